import dataclasses

import pytest

from gramcert.experiments.tables import ACCURACIES, PAPER, RESCALINGS, summary
from gramcert.training.configuration import CONFIGURATIONS


def test_summary_is_mean_and_deviation_over_the_seeds():
    rows = [
        {"rescaling": "A", "seed": 0} | dict.fromkeys(ACCURACIES, 1.0),
        {"rescaling": "A", "seed": 1} | dict.fromkeys(ACCURACIES, 4.0),
        {"rescaling": "B", "seed": 0} | dict.fromkeys(ACCURACIES, 2.0),
    ]
    first, second = summary(rows)
    assert (first["rescaling"], first["seeds"], first["clean"]) == ("A", 2, 2.5)
    assert first["clean deviation"] == pytest.approx(3 / 2**0.5)  # not rounded: whoever prints it rounds it once
    assert (second["rescaling"], second["seeds"], second["36/255"], second["36/255 deviation"]) == ("B", 1, 2.0, None)


@pytest.mark.parametrize("name", ["nano", "cifar10-S", "cifar100-M"])
def test_every_rescaling_fits_every_configuration(name):
    for rescaling in RESCALINGS:
        dataclasses.replace(CONFIGURATIONS[name], **rescaling.fields)


def test_figures_of_the_paper_have_all_columns_and_sr_above_aol():
    for sizes in PAPER.values():
        for methods in sizes.values():
            assert len(methods["AOL"]) == len(methods["SR, t = 3"]) == len(ACCURACIES)
            assert all(ours > theirs for ours, theirs in zip(methods["SR, t = 3"], methods["AOL"], strict=True))
