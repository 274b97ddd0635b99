import json
import os
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from gramcert.training import loop
from gramcert.training.checkpoints import METRICS, MODEL, STATE, Trained
from gramcert.training.configuration import named
from gramcert.training.images import load_images
from gramcert.training.loop import train
from patience import PATIENCE, next_line
from training.halting import HALTED

# Everything that processes must do alike: two stages, all of the augmentation, evaluations of fewer images than a
# process would take.
CHANGES = {
    "name": "two processes",
    "dataset": "folder",
    "widths": "4,16",
    "blocks": "1,1",
    "inner": "4,4",
    "dense_inner": "8",
    "epochs": "6",
    "batch": "16",
    "augmentation.crop": "1",
    "augmentation.flip": "true",
    "augmentation.brightness": "0.8,1.2",
    "augmentation.contrast": "0.8,1.2",
    "augmentation.saturation": "0.8,1.2",
    "augmentation.hue": "0.05",
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Noisy coloured squares: three classes of 16 training images and 7 test images."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for part, count in (("train", 16), ("test", 7)):
        for label, name in enumerate(("red", "green", "blue")):
            (folder / part / name).mkdir(parents=True)
            for index in range(count):
                image = random.integers(0, 200, (8, 8, 3), dtype=np.uint8)
                image[..., label] += 55
                Image.fromarray(image).save(folder / part / name / f"{index:02}.png")
    return folder


def start(data, folder, program=("-m", "gramcert"), **changes):
    """Two processes, by torchrun."""
    options = [word for item in (CHANGES | changes).items() for word in ("--set", "=".join(item))]
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--rdzv-conf", f"read_timeout={PATIENCE:.0f}"),
        *(*program, "train", "digits", "--data", str(data), "--out", str(folder)),
        *("--checkpoint-seconds", "0", "--json", *options),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process):
    """It, and the processes that it started."""
    if process.poll() is None:
        for member in (*psutil.Process(process.pid).children(recursive=True), process):
            member.kill()
        process.communicate(timeout=PATIENCE)


def finish(process):
    """What it said, and its errors."""
    try:
        return process.communicate(timeout=PATIENCE)
    finally:
        end(process)


@pytest.fixture(scope="module")
def alone(pictures, tmp_path_factory):
    """The folder and the records of the run in one process."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    return folder, train(named("digits").with_fields(CHANGES), load_images("folder", pictures), folder)


def require_agreement(folder, alone):
    """To rounding, which the sums of the two halves of each batch differ by."""
    other, records = alone
    bound = 1000 * torch.finfo(torch.float32).eps
    found = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert [record.keys() for record in found] == [record.keys() for record in records]
    for record, expected in zip(found, records, strict=True):
        assert record["step"] == expected["step"]
        assert record["loss"] == pytest.approx(expected["loss"], rel=bound)
        assert record["clean"] == pytest.approx(expected["clean"], abs=1.5 / 21)  # one image of those tested
    weights, expected = load_file(folder / MODEL), load_file(other / MODEL)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=bound)
    assert any(not torch.equal(weights[name], expected[name]) for name in weights)  # they did share the batches
    return found


def test_two_processes_end_where_one_does(pictures, alone, tmp_path):
    folder = tmp_path / "run"
    process = start(pictures, folder, (str(Path(__file__).with_name("leaving.py")),))
    said, errors = finish(process)
    assert process.returncode == 0, errors
    found = require_agreement(folder, alone)
    assert found[-1]["step"] == 18
    assert json.loads(said) == {"out": str(folder), "configuration": "two processes"} | found[-1]  # said by one only
    assert Trained(folder).facts["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", [12, 31])
def test_two_processes_that_are_killed_go_on(pictures, alone, tmp_path, moment):
    folder = tmp_path / "run"
    process = start(pictures, folder, (str(Path(__file__).with_name("halting.py")), str(folder), str(moment)))
    try:
        assert next_line(process) == HALTED
    finally:
        end(process)
    assert (folder / STATE).exists()
    assert not (folder / MODEL).exists()  # it was killed on its way
    process = start(pictures, folder)
    _, errors = finish(process)
    assert process.returncode == 0, errors
    require_agreement(folder, alone)


@pytest.mark.slow
def test_a_batch_that_two_processes_cannot_share(pictures, tmp_path):
    process = start(pictures, tmp_path / "run", batch="15")
    said, errors = finish(process)
    assert process.returncode != 0
    assert said == ""
    # Each process says it, unless torchrun has ended it before.
    lines = {line for line in errors.splitlines() if line.startswith("error: ")}
    assert lines == {"error: train(batch=15): expected a multiple of the 2 processes"}
    assert "gramcert/" not in errors  # no traceback of ours
    assert not (tmp_path / "run").exists()


def test_a_batch_that_the_processes_cannot_share(digits, tiny, tmp_path, monkeypatch):
    three = SimpleNamespace(process_index=0, num_processes=3, device=None)
    monkeypatch.setattr(loop, "_engine", lambda _: nullcontext(three))
    with pytest.raises(ValueError, match=r"^train\(batch=64\): expected a multiple of the 3 processes$"):
        train(tiny(), digits, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_folder_that_is_refused(pictures, tmp_path):
    """Every process leaves with one line."""
    (tmp_path / "x").touch()
    process = start(pictures, tmp_path)
    said, errors = finish(process)
    assert process.returncode != 0
    assert said == ""
    lines = {line for line in errors.splitlines() if line.startswith("error: ")}
    assert any("expected an empty folder, or one with a run of this configuration" in line for line in lines)
    assert "gramcert/" not in errors  # no traceback of ours
    assert {path.name for path in tmp_path.iterdir()} == {"x"}


def engine_with(other, *, first=True):
    """Of a process, the other of which has this to say."""

    def gather(own):
        return torch.cat([own, torch.tensor([other], dtype=own.dtype)])

    return SimpleNamespace(gather=gather, device=None, is_main_process=first)


def test_processes_that_were_given_different_things():
    loop._require_same_run(SimpleNamespace(gather=lambda own: torch.cat([own, own]), device=None), "this")
    with pytest.raises(ValueError, match="train: the processes were given different configurations or images"):
        loop._require_same_run(engine_with(12345), "this")


def test_processes_that_read_different_states():
    loop._require_same_step(engine_with(7), 7)
    with pytest.raises(ValueError, match=r"states of steps \[7, 8\]; expected a shared folder"):
        loop._require_same_step(engine_with(7), 8)


def test_a_process_whose_first_was_refused(tiny, tmp_path):
    with ExitStack() as stack:
        loop._claim(engine_with(0, first=False), stack, tmp_path, tiny())
        with pytest.raises(ValueError, match="the first process was refused its folder"):
            loop._claim(engine_with(1, first=False), stack, tmp_path, tiny())
        assert not list(tmp_path.iterdir())
        (tmp_path / "x").touch()
        with pytest.raises(ValueError, match="expected an empty folder"):
            loop._claim(engine_with(0), stack, tmp_path, tiny())
