"""Tables 1 and 2: clean and certified accuracy of SLL networks with different rescalings."""

import dataclasses
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gramcert.certification.accuracy import certify
from gramcert.exact import float_up
from gramcert.experiments.records import Records, Row
from gramcert.progress import Report, silent
from gramcert.training.checkpoints import Trained
from gramcert.training.configuration import Configuration
from gramcert.training.images import Images, Labelled
from gramcert.training.loop import RADII, train

# As they are written, and as floats that are not below them.
EXACT_RADII = {f"{radius}/255": float_up(Fraction(radius, 255)) for radius in RADII}

ACCURACIES = ("clean", *EXACT_RADII)

KEY = ("rescaling", "seed")
COLUMNS = (*KEY, *ACCURACIES, "lipschitz", "seconds", "steps")

# Accuracy in per cent as the paper prints it, averages of three runs of 1000 epochs. The last column of the small
# network on CIFAR-100 is printed as 0.073 and 0.075, surely shares and not per cents.
PAPER: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "cifar10": {
        "S": {"AOL": (71.06, 62.78, 53.67, 45.37, 19.18), "SR, t = 3": (72.44, 63.49, 54.66, 46.01, 19.62)},
        "M": {"AOL": (72.41, 63.72, 54.48, 46.38, 19.92), "SR, t = 3": (73.38, 64.64, 55.43, 46.79, 20.18)},
    },
    "cifar100": {
        "S": {"AOL": (46.05, 35.13, 26.72, 20.49, 0.073), "SR, t = 3": (46.62, 35.46, 27.42, 21.14, 0.075)},
        "M": {"AOL": (46.50, 35.81, 27.39, 21.21, 7.78), "SR, t = 3": (47.50, 36.50, 28.54, 21.89, 8.13)},
    },
}


@dataclass(frozen=True)
class Rescaling:
    """One line of the table: how the layers are rescaled."""

    name: str
    slug: str
    fields: dict[str, Any]


RESCALINGS = (
    Rescaling("AOL", "aol", {"rescaling": "aol", "form": "spatial", "iterations": 1}),
    Rescaling("SR, t = 3", "sr3", {"rescaling": "sr", "form": "spatial", "iterations": 3}),
    Rescaling("frequency SR, t = 1", "frequency1", {"rescaling": "sr", "form": "frequency", "iterations": 1}),
    Rescaling("frequency SR, t = 2", "frequency2", {"rescaling": "sr", "form": "frequency", "iterations": 2}),
)


def table_rows(
    records: Records,
    base: Configuration,
    images: Images,
    seeds: tuple[int, ...],
    rescalings: tuple[Rescaling, ...] = RESCALINGS,
    *,
    keep_runs: bool = True,
    report: Report = silent,
) -> None:
    """Trains and certifies every network that has no row yet; seeds outermost, so that methods can be compared early.

    Args:
        records: where rows go.
        base: what all networks share.
        images: on what.
        seeds: of the repetitions; a seed gives all methods the same start, order of images and augmentation.
        rescalings: the lines of the table.
        keep_runs: whether the folders of finished runs stay.
        report: told what is being done, how many are done, and of how many.
    """
    records.require_data(images.digest())
    wanted = [(seed, rescaling) for seed in seeds for rescaling in rescalings]
    for number, (seed, rescaling) in enumerate(wanted):
        if records.has(rescaling=rescaling.name, seed=seed):
            continue
        configuration = dataclasses.replace(base, seed=seed, **rescaling.fields)
        test = images.limited(configuration.images, configuration.holdout).test
        folder = records.folder / "runs" / records.name / f"{rescaling.slug}-{seed}"

        def shown(what: str, done: int, total: int | None, number: int = number, test: Labelled = test) -> None:
            report("networks", number, len(wanted))
            report(what, done, len(test) if total is None else total)

        train(configuration, images, folder, report=lambda _, done, total: shown("steps", done, total))
        trained = Trained(folder)
        found = certify(trained.model, test.loader(), list(EXACT_RADII.values()), report=shown)
        accuracy = {"clean": found.clean} | {text: found.certified[value] for text, value in EXACT_RADII.items()}
        row: Row = {"rescaling": rescaling.name, "seed": seed}
        row |= {text: round(100 * share, 4) for text, share in accuracy.items()}
        row |= {"lipschitz": found.lipschitz, "seconds": trained.facts["seconds"], "steps": trained.facts["steps"]}
        records.add([row], summary)
        if not keep_runs:
            shutil.rmtree(folder)


def summary(rows: list[Row]) -> Iterator[Row]:
    """For each rescaling the mean over the seeds, the standard deviation, and how many there are."""
    for name in dict.fromkeys(row["rescaling"] for row in rows):
        chosen = [row for row in rows if row["rescaling"] == name]
        line: Row = {"rescaling": name, "seeds": len(chosen)}
        for column in ACCURACIES:
            values = [row[column] for row in chosen]
            line[column] = statistics.mean(values)
            line[f"{column} deviation"] = statistics.stdev(values) if len(values) > 1 else None
        yield line
