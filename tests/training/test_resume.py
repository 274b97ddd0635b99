import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gramcert.training import loop
from gramcert.training.checkpoints import CONFIGURATION, METRICS, MODEL, STATE, save_state
from gramcert.training.loop import train
from patience import next_line
from training.halting import HALTED

HALTING = Path(__file__).with_name("halting.py")

# Files that a run opens, renames and removes before its first step, and in each step at least.
CLAIMING, MOMENTS_PER_STEP = 8, 3


def step_of(folder):
    """Of the state on disk, which is opened once: it may be replaced at any time. 0 without one."""
    if not (folder / STATE).exists():
        return 0
    content = (folder / STATE).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["facts"])["step"]


def killed_at_random(words, folder, kills, moments_between, seed):
    """Run the command so many times, killed each time; the steps at which its states then were.

    Moments of three kinds: some steps later; when the folder has just been claimed, or found again; and before anything
    was imported.
    """
    numbers = random.Random(seed)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    steps = []
    for kill in range(kills):
        later = (CLAIMING + MOMENTS_PER_STEP, CLAIMING + moments_between)
        moment = numbers.randint(*(later, (1, CLAIMING), later, (0, 0))[kill % 4])
        command = [sys.executable, HALTING, folder, moment, *words]
        with subprocess.Popen([str(word) for word in command], env=environment, stdout=subprocess.PIPE) as process:
            assert next_line(process) == HALTED.encode()
            process.kill()
        steps.append(step_of(folder))
    return steps


def curves(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def require_same_run(found, expected):
    assert {path.name for path in found.iterdir()} == {CONFIGURATION, METRICS, MODEL, STATE, "tensorboard", ".lock"}
    for file in (MODEL, STATE):
        tensors, wanted = (load_file(folder / file) for folder in (found, expected))
        assert tensors.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert tensors[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert (found / METRICS).read_bytes() == (expected / METRICS).read_bytes()
    assert curves(found) == curves(expected)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_ends_as_one_that_is_not(digits, tiny, tiny_options, tmp_path, kills):
    changes = {"epochs": str(10 * kills), "evaluate_every": "3", "augmentation.crop": "1"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    last = train(tiny(**changes), digits, whole)[-1]["step"]
    words = ["train", "digits", "--out", str(parts), "--checkpoint-seconds", "0", *tiny_options(**changes)]
    steps = killed_at_random(words, parts, kills, MOMENTS_PER_STEP * last // (kills + 1), seed=kills)
    assert steps == sorted(steps)
    assert len({step for step in steps if 0 < step < last}) >= kills // 2  # it was killed on its way
    train(tiny(**changes), digits, parts)
    require_same_run(parts, whole)


class StopHere(Exception):  # noqa: N818 - nothing is wrong
    pass


def some_time_passes(folder):
    """TensorBoard reads its files in the order of their names, which begin with the second of the start."""
    (file,) = (folder / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.0000000000.earlier"))


@pytest.fixture(scope="module")
def undisturbed(digits, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(tiny(), digits, folder)
    return folder


@pytest.mark.parametrize("checkpoint_seconds", [-1, 1000], ids=["a state at each step", "a state at each epoch"])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_that_stops_at_a_step(digits, tiny, tmp_path, monkeypatch, undisturbed, stop, checkpoint_seconds):
    """In an epoch, at its end and after it, with four steps per epoch."""

    def watch(what, done, total):
        if done == stop:
            raise StopHere("here")

    monkeypatch.setattr(loop, "REPORT_SECONDS", -1)
    with pytest.raises(StopHere, match="here"):
        train(tiny(), digits, tmp_path / "run", report=watch, checkpoint_seconds=checkpoint_seconds)
    assert step_of(tmp_path / "run") == (stop if checkpoint_seconds < 0 else stop // 4 * 4)
    some_time_passes(tmp_path / "run")
    seen = []
    train(tiny(), digits, tmp_path / "run", report=lambda what, done, total: seen.append(done))
    assert seen == list(range(stop if checkpoint_seconds < 0 else stop // 4 * 4, 9))
    require_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("step", [1, 4, 8])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_stops_around_the_writing_of_a_state(digits, tiny, tmp_path, monkeypatch, undisturbed, step, when):
    """Before a state at the end of an epoch, the record of the epoch is on disk already."""

    def save(folder, model, optimizer, facts):
        if facts["step"] == step and when == "before":
            raise StopHere("here")
        save_state(folder, model, optimizer, facts)
        if facts["step"] == step:
            raise StopHere("here")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "save_state", save)
        with pytest.raises(StopHere, match="here"):
            train(tiny(), digits, tmp_path / "run", checkpoint_seconds=-1)
    assert step_of(tmp_path / "run") == (step if when == "after" else step - 1)
    some_time_passes(tmp_path / "run")
    train(tiny(), digits, tmp_path / "run")
    require_same_run(tmp_path / "run", undisturbed)


def test_a_run_that_stops_before_its_first_step(digits, tiny, tmp_path, undisturbed):
    """Killed when only the configuration was there, and something half written."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIGURATION).write_text(tiny().to_json())
    (folder / f".{STATE}.123.unfinished").write_bytes(b"half")
    train(tiny(), digits, folder)
    require_same_run(folder, undisturbed)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f".{CONFIGURATION}.123.unfinished").write_bytes(b"half")
    train(tiny(), digits, tmp_path / "other")
    require_same_run(tmp_path / "other", undisturbed)


@pytest.mark.parametrize("content", ["garbage", "3", "[]", "null", '{"epoch": 1}', '{"step": null}', '{"step": 1'])
def test_records_that_cannot_be_read(digits, tiny, tmp_path, content):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIGURATION).write_text(tiny().to_json())
    (folder / METRICS).write_text(content + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: expected the records of a run"):
        train(tiny(), digits, folder)
