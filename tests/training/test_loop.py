import dataclasses
import json
import re
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gramcert
from gramcert.training import loop
from gramcert.training.checkpoints import CONFIGURATION, METRICS, MODEL, STATE, Trained
from gramcert.training.configuration import from_json
from gramcert.training.images import Images
from gramcert.training.loop import train
from gramcert.training.networks import build

EPS = torch.finfo(torch.float32).eps


def weights(folder):
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / MODEL).items()}


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def scalars(folder):
    """The curves of TensorBoard: (step, value) by name."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def shares(folder, images):
    """Clean accuracy, and the shares of margins beyond each radius, from the formula for 1-Lipschitz features."""
    trained = Trained(folder)
    with torch.no_grad():
        logits = trained.model(images.values()).double()
        rows = trained.model[-1].weight.double()
    clean, counts = 0, Counter()
    for values, label in zip(logits, images.labels.tolist(), strict=True):
        if values.argmax() != label:
            continue
        clean += 1
        others = [i for i in range(len(values)) if i != label]
        radius = min(float((values[label] - values[i]) / (rows[label] - rows[i]).norm()) for i in others)
        counts.update(n for n in (36, 72, 108, 255) if radius > n / 255)
    result = {"clean": clean} | {f"estimated_{n}": counts[n] for n in (36, 72, 108, 255)}
    return {name: count / len(images) for name, count in result.items()}


@pytest.fixture(scope="module")
def finished(digits, tiny, tmp_path_factory):
    """A run that the tests below only read."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / "run"
    reports, ended = [], []
    configuration = tiny(epochs="4")
    records = train(
        configuration,
        digits,
        folder,
        report=lambda *told: reports.append(told),
        on_epoch=ended.append,
        checkpoint_seconds=0,
    )
    return SimpleNamespace(configuration=configuration, folder=folder, reports=reports, ended=ended, records=records)


def test_the_folder_of_a_finished_run(finished):
    names = {path.name for path in finished.folder.iterdir()}
    assert names == {CONFIGURATION, METRICS, MODEL, STATE, "tensorboard", ".lock"}
    assert from_json((finished.folder / CONFIGURATION).read_text()) == finished.configuration
    trained = Trained(finished.folder)
    assert trained.configuration == finished.configuration
    assert trained.shape == (1, 8, 8)
    assert trained.classes == tuple("0123456789")
    assert trained.facts["steps"] == 16
    assert trained.facts["processes"] == 1
    assert trained.facts["seconds"] > 0


def test_one_record_per_epoch(finished):
    assert lines(finished.folder) == finished.records
    assert [record["epoch"] for record in finished.records] == [1, 2, 3, 4]
    assert [record["step"] for record in finished.records] == [4, 8, 12, 16]
    places = (np.array([4, 8, 12, 16]) - 0.5) / 16
    rates = np.interp(places, [0, 0.4, 0.8, 1], [0, 0.01, 0.0005, 0])
    np.testing.assert_allclose([record["lr"] for record in finished.records], rates)


def test_training_helps(finished):
    losses = [record["loss"] for record in finished.records]
    assert losses[-1] < 0.7 * losses[0]
    assert finished.records[-1]["clean"] > 0.3


def test_reports(finished):
    assert finished.ended == finished.records
    assert finished.reports[0] == ("epoch 1/4", 0, 16)
    for record in finished.records:
        assert (f"epoch {record['epoch']}/4, loss {record['loss']:.4f}", record["step"], 16) in finished.reports


def test_what_is_no_configuration_no_images_and_no_folder(digits, tiny, tmp_path):
    with pytest.raises(TypeError, match=r"^train\(configuration\): expected a Configuration or its name, got dict$"):
        gramcert.train({}, digits, tmp_path)
    with pytest.raises(ValueError, match=r"^configuration 'digit': expected one of digits, nano"):
        gramcert.train("digit", digits, tmp_path)
    with pytest.raises(TypeError, match=r"^train\(images\): expected Images, as load_images gives them, got str$"):
        gramcert.train("digits", "digits", tmp_path)
    with pytest.raises(TypeError, match=r"^train\(folder\): expected a path, got NoneType$"):
        gramcert.train(tiny(), digits, None)
    assert not any(tmp_path.iterdir())


def test_tensorboard_has_the_same_numbers(finished):
    found = scalars(finished.folder)
    assert found.keys() == {"lr", "loss", "clean", *(f"estimated_{n}" for n in (36, 72, 108, 255))}
    for name, curve in found.items():
        expected = [(record["step"], float(np.float32(record[name]))) for record in finished.records]
        assert curve == expected


def test_the_last_shares_are_those_of_the_network(finished, digits):
    expected = shares(finished.folder, digits.test)
    assert {name: finished.records[-1][name] for name in expected} == expected
    assert expected["clean"] > expected["estimated_36"] > 0


def test_a_finished_run_is_not_trained_again(finished, digits, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    monkeypatch.setattr(loop, "_update", None)  # which every step needs
    assert train(finished.configuration, digits, folder) == finished.records
    (folder / STATE).unlink()  # which nobody needs any more
    assert train(finished.configuration, digits, folder) == finished.records
    del before[STATE]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert scalars(folder) == scalars(finished.folder)


def test_a_run_that_ended_before_its_network_was_written(finished, digits, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    (folder / MODEL).unlink()
    assert train(finished.configuration, digits, folder) == finished.records
    assert weights(folder) == weights(finished.folder)


def test_the_result_depends_on_the_seed_alone(digits, tiny, tmp_path):
    runs = {name: tiny(seed=seed, epochs="1") for name, seed in (("one", "3"), ("same", "3"), ("other", "4"))}
    torch.manual_seed(0)
    records = {}
    for name, configuration in runs.items():
        records[name] = train(configuration, digits, tmp_path / name)
        torch.rand(5)
    assert weights(tmp_path / "one") == weights(tmp_path / "same")
    assert records["one"] == records["same"]
    drawn = [name for name in weights(tmp_path / "one") if not name.startswith("0.")]  # not the means
    assert len(drawn) == 8
    assert not any(weights(tmp_path / "one")[name] == weights(tmp_path / "other")[name] for name in drawn)


def test_the_generator_of_the_caller_is_left_alone(digits, tiny, tmp_path):
    before = torch.get_rng_state()
    train(tiny(epochs="1", images="64"), digits, tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_one_step_by_hand(digits, tiny, tmp_path):
    """The loss of the network at its start, and Adam's first step, which has the length of the rate."""
    configuration = tiny(epochs="1", images="64")
    (record,) = train(configuration, digits, tmp_path / "run")
    images = digits.train[:64]
    network = build(configuration, (1, 8, 8), 10, [float(images.images.double().mean()) / 16])
    shifted = network(images.values()) - configuration.offset * torch.nn.functional.one_hot(images.labels, 10)
    logs = torch.log_softmax(shifted / configuration.temperature, 1)
    loss = -configuration.temperature * logs.gather(1, images.labels[:, None]).mean()
    loss.backward()
    assert record["loss"] == pytest.approx(loss.item(), rel=100 * EPS)
    rate = float(np.interp(0.5, [0, 0.4, 0.8, 1], [0, 0.01, 0.0005, 0]))
    assert record["lr"] == pytest.approx(rate)
    found = load_file(tmp_path / "run" / MODEL)
    for name, parameter in network.named_parameters():
        clear = parameter.grad.abs() > 1e-4  # of others, rounding decides the direction
        assert clear.any()
        expected = parameter.detach() - rate * parameter.grad.sign()
        torch.testing.assert_close(found[name][clear], expected[clear], rtol=0, atol=2e-4 * rate)
    assert found["0.values"].tolist() == pytest.approx([-float(images.images.double().mean()) / 16])


@pytest.mark.parametrize("loss", ["offset", "annealing"])
def test_the_loss_is_the_one_of_the_configuration(digits, tiny, tmp_path, loss):
    configuration = tiny(epochs="1", images="64", loss=loss, offset="0.3", temperature="0.7")
    (record,) = train(configuration, digits, tmp_path / "run")
    images = digits.train[:64]
    network = build(configuration, (1, 8, 8), 10, [float(images.images.double().mean()) / 16])
    with torch.no_grad():
        shifted = network(images.values()).double() - 0.3 * torch.nn.functional.one_hot(images.labels, 10)
    probability = torch.softmax(shifted / 0.7, 1)[torch.arange(64), images.labels]
    factor = 1 if loss == "offset" else (1 - probability) ** 5
    assert record["loss"] == pytest.approx(float((-0.7 * factor * probability.log()).mean()), rel=1e-4)


def test_every_image_is_seen_once_per_epoch_in_an_order_of_its_own(digits, tiny, tmp_path, monkeypatch):
    seen = []
    original = loop._update

    def watched(engine, model, optimizer, loss, rate, x, labels):
        seen.append((x * 16).round().to(torch.uint8).flatten(1))
        return original(engine, model, optimizer, loss, rate, x, labels)

    monkeypatch.setattr(loop, "_update", watched)
    train(tiny(images="150", batch="50"), digits, tmp_path / "run")
    assert [len(part) for part in seen] == [50] * 6
    first, second = (torch.cat(seen[start : start + 3]).tolist() for start in (0, 3))
    expected = digits.train.images[:150].flatten(1).tolist()
    assert sorted(first) == sorted(second) == sorted(expected)
    assert first != second
    assert expected not in (first, second)


def test_images_beyond_whole_batches_wait_for_the_next_epoch(digits, tiny, tmp_path):
    records = train(tiny(images="100"), digits, tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2]


def test_holdout(digits, tiny, tmp_path):
    configuration = tiny(epochs="1", holdout="300", images="1100", batch="550")
    (record,) = train(configuration, digits, tmp_path / "run")
    expected = shares(tmp_path / "run", digits.train[1100:])
    assert {name: record[name] for name in expected} == expected
    # The test images are not even looked at.
    nothing = dataclasses.replace(digits, test=digits.test[:0])
    assert train(configuration, nothing, tmp_path / "other") == [record]
    assert weights(tmp_path / "run") == weights(tmp_path / "other")


def test_augmentation_changes_the_result(digits, tiny, tmp_path):
    changes = {"augmentation.crop": "1", "augmentation.flip": "true"}
    plain, changed, again = (tmp_path / name for name in ("plain", "changed", "again"))
    train(tiny(epochs="1"), digits, plain)
    train(tiny(epochs="1", **changes), digits, changed)
    train(tiny(epochs="1", **changes), digits, again)
    assert weights(changed) == weights(again) != weights(plain)


def test_evaluations_now_and_then_and_at_the_end(digits, tiny, tmp_path):
    records = train(tiny(epochs="5", images="64", evaluate_every="2"), digits, tmp_path / "run")
    assert [record["epoch"] for record in records if "clean" in record] == [2, 4, 5]
    assert len(scalars(tmp_path / "run")["clean"]) == 3
    assert len(scalars(tmp_path / "run")["loss"]) == 5


def test_bfloat16_is_for_products_only(digits, tiny, tmp_path):
    records = train(tiny(precision="bfloat16"), digits, tmp_path / "half")
    exact = train(tiny(), digits, tmp_path / "whole")
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / MODEL).values()} == {torch.float32}
    assert weights(tmp_path / "half") != weights(tmp_path / "whole")
    assert records[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.05)
    assert records[1]["loss"] < records[0]["loss"]


def test_a_loss_that_is_not_finite_is_said(digits, tiny, tmp_path):
    with pytest.raises(ValueError, match="train, epoch 1: expected a finite loss, got nan"):
        train(tiny(lr="1e38", blocks="0", dense_blocks="0"), digits, tmp_path / "head")
    with pytest.raises(ValueError, match=r"SLLConv2d.*: expected finite values"):
        train(tiny(lr="1e38"), digits, tmp_path / "blocks")
    for name in ("head", "blocks"):
        assert not (tmp_path / name / MODEL).exists()
        assert lines(tmp_path / name) == []


def test_the_folder_of_another_run_is_refused(finished, digits, tiny):
    before = {path.name: path.read_bytes() for path in finished.folder.iterdir() if path.is_file()}
    for changes in ({"epochs": "5"}, {"epochs": "4", "seed": "1"}, {"epochs": "4", "augmentation.crop": "1"}):
        with pytest.raises(ValueError, match=r"run\): it holds a run of another configuration, \w+=.*; choose"):
            train(tiny(**changes), digits, finished.folder)
    assert {path.name: path.read_bytes() for path in finished.folder.iterdir() if path.is_file()} == before


def test_a_folder_with_something_else_is_refused(digits, tiny, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="expected an empty folder, or one with a run of this configuration"):
        train(tiny(), digits, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder(digits, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=rf"train\(folder={re.escape(str(path))}\): not a folder that can be"):
            train(tiny(), digits, path)


def test_a_configuration_that_cannot_be_read(digits, tiny, tmp_path):
    (tmp_path / CONFIGURATION).write_text("{")
    with pytest.raises(ValueError, match="Configuration: Invalid JSON"):
        train(tiny(), digits, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": "257"}, r"train\(batch=257\): more than the 256 training images"),
        ({"images": "1401"}, r"Configuration\(images=1401\): expected at most the 1400 training images"),
        ({"holdout": "1400"}, r"Configuration\(holdout=1400\): expected less than the 1400 training images"),
        ({"holdout": "1200"}, r"Configuration\(images=256\): expected at most the 200 training images"),
        ({"augmentation.crop": "8"}, r"train\(augmentation\.crop=8\): expected less than the 8 pixels"),
        ({"pool": "3"}, "8×8 places cannot be pooled by 3"),
    ],
)
def test_what_the_images_do_not_allow_leaves_no_folder(digits, tiny, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(tiny(**changes), digits, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_images_of_another_shape_than_the_state(finished, digits, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    (folder / MODEL).unlink()
    padded = [
        dataclasses.replace(part, images=torch.nn.functional.pad(part.images, (4, 4, 4, 4)))
        for part in (digits.train, digits.test)
    ]
    with pytest.raises(ValueError, match=r"state\.safetensors: expected model\.5\.weight of shape"):
        train(finished.configuration, Images(*padded, digits.classes), folder)


def test_without_tensorboard(digits, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    records = train(tiny(images="64"), digits, tmp_path / "run")
    assert lines(tmp_path / "run") == records
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_without_accelerate(digits, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"train: needs accelerate \(pip install 'gramcert\[train\]'\)"):
        train(tiny(), digits, tmp_path / "run")


def test_other_images_do_not_go_on_with_a_run(finished, digits, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    other = dataclasses.replace(digits, train=digits.train[torch.arange(len(digits.train)).flip(0)])
    with pytest.raises(ValueError, match="its run was begun with other images"):
        train(finished.configuration, other, folder)


def test_other_test_images_than_a_run_was_begun_with(digits, tiny, tmp_path):
    """Records of both would stand in one file."""
    train(tiny(images="64"), digits, tmp_path / "run")
    (tmp_path / "run" / MODEL).unlink()
    for images in (
        dataclasses.replace(digits, test=digits.test[:100]),
        dataclasses.replace(digits, classes=tuple("abcdefghij")),
    ):
        with pytest.raises(ValueError, match="its run was begun with other images"):
            train(tiny(images="64"), images, tmp_path / "run")


def test_the_environment_does_not_change_the_loss(digits, tiny, tmp_path, monkeypatch):
    expected = train(tiny(images="64"), digits, tmp_path / "one")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert train(tiny(images="64"), digits, tmp_path / "two") == expected


@pytest.mark.parametrize("line", ["[" * 100_000, '{"step": "3"}', '{"step": 1.5}', '{"step": true}', "1", "{}"])
def test_records_that_are_none(digits, tiny, tmp_path, line):
    folder = tmp_path / "run"
    train(tiny(images="64"), digits, folder)
    (folder / METRICS).write_text(line)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: expected the records of a run"):
        train(tiny(images="64"), digits, folder)
