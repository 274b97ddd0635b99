"""Files of a run, each written whole or not at all, and none of them a pickle.

``state.safetensors`` holds everything that goes on changing, weights, moments of Adam and the step, in one file, so
that a run killed at any moment finds one consistent state. ``model.safetensors`` holds the weights of a finished run
and the configuration, so that it needs nothing beside it.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.files import locked, open_lock, opened_safetensors, remove_unfinished, write_atomically
from gramcert.training.configuration import Configuration, from_file, from_json
from gramcert.training.networks import build

STATE, MODEL, METRICS, CONFIGURATION = "state.safetensors", "model.safetensors", "metrics.jsonl", "configuration.json"

_FORMAT = "gramcert network 1"

_LOCK = ".lock"


@contextmanager
def claimed(folder: Path, configuration: Configuration) -> Iterator[None]:
    """The folder is this run's alone; one of another configuration, or in use by another process, is refused."""
    call = f"train(folder={folder})"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_own(call, folder)  # before anything is written
        lock = open_lock(folder / _LOCK)
    except OSError as error:
        raise ValueError(f"{call}: not a folder that can be written ({error.strerror})") from None
    with lock:
        if not locked(lock):
            raise ValueError(f"{call}: another process is training in it")
        remove_unfinished(folder, STATE, MODEL, METRICS, CONFIGURATION)
        path = folder / CONFIGURATION
        if not path.exists():
            write_atomically(path, configuration.to_json().encode())
        other = from_file(path)
        if other != configuration:
            fields = [f.name for f in dataclasses.fields(other)]
            changed = [name for name in fields if getattr(other, name) != getattr(configuration, name)]
            what = ", ".join(f"{name}={getattr(other, name)}" for name in changed)
            raise ValueError(f"{call}: it holds a run of another configuration, {what}; choose another folder")
        yield


def _require_own(call: str, folder: Path) -> None:
    """A folder with a configuration, or without anything that a run has not begun with."""
    begun = f".{CONFIGURATION}."
    names = {child.name for child in folder.iterdir() if not child.name.startswith(begun)}
    if CONFIGURATION not in names and names - {_LOCK}:
        raise ValueError(f"{call}: expected an empty folder, or one with a run of this configuration")


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Weights, moments and ``facts`` (numbers and text) in one file; a lost network does not replace a good one."""
    from safetensors.torch import save

    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    lost = [name for name, tensor in plain.items() if not bool(torch.isfinite(tensor).all())]
    if lost:
        raise ValueError(f"train, step {facts['step']}: NaN or infinity in {lost[0]}; a smaller lr may help")
    write_atomically(folder / STATE, save(plain, {"facts": json.dumps(facts)}))


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Adam, steps: int) -> dict[str, Any] | None:
    """Puts a saved state back and returns its facts; ``None`` if there is none.

    Args:
        folder: of the run.
        model: gets the weights.
        optimizer: gets the moments.
        steps: of the whole run.
    """
    path = folder / STATE
    if not path.exists():
        return None
    tensors, metadata = _read(path)
    facts = _facts(path, metadata, steps)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    wanted = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, parameter in enumerate(parameters):
        wanted[f"optimizer.{index}.step"] = torch.tensor(0.0)
        wanted |= {f"optimizer.{index}.{moment}": parameter for moment in ("exp_avg", "exp_avg_sq")}
    _require_same(path, wanted, tensors)
    _load_weights(path, model, {name: tensors[f"model.{name}"] for name in model.state_dict()})
    moments = {
        index: {name: tensors[f"optimizer.{index}.{name}"] for name in ("step", "exp_avg", "exp_avg_sq")}
        for index in range(len(parameters))
    }
    for moment in moments.values():
        if float(moment["step"]) != facts["step"] or not bool((moment["exp_avg_sq"] >= 0).all()):
            raise ValueError(f"{path}: not a state of this run (moments that Adam cannot have)")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return facts


def _facts(path: Path, metadata: dict[str, str], steps: int) -> dict[str, Any]:
    """What a state says about itself, if it can be true."""
    try:
        facts = json.loads(metadata["facts"])
        step, loss, seconds = facts["step"], float(facts["loss"]), float(facts["seconds"])
        fine = type(step) is int and 0 < step <= steps and math.isfinite(loss) and 0 <= seconds < math.inf
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: not a state of this run ({error or type(error).__name__})") from None
    if not fine:
        raise ValueError(f"{path}: not a state of this run of {steps} steps (step {step!r}, loss {loss})")
    return dict(facts) | {"loss": loss, "seconds": seconds}


def save_model(
    folder: Path,
    model: nn.Module,
    configuration: Configuration,
    shape: tuple[int, int, int],
    classes: tuple[str, ...],
    facts: dict[str, Any],
) -> None:
    """The finished network: weights as they are trained, and what is needed to build it again."""
    from safetensors.torch import save

    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {
        "format": _FORMAT,
        "configuration": configuration.to_json(),
        "shape": json.dumps(shape),
        "classes": json.dumps(classes),
        "facts": json.dumps(facts),
    }
    write_atomically(folder / MODEL, save(weights, metadata))


def save_inputs(path: Path, tensors: dict[str, Tensor]) -> None:
    """Inputs that somebody shall look at."""
    from safetensors.torch import save

    write_atomically(path, save(tensors))


class Trained:
    """A finished network, read from its folder or file.

    Args:
        path: what ``gramcert train`` wrote, or the ``model.safetensors`` in it.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        file = path / MODEL if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path}: expected a folder of `gramcert train` with a finished {MODEL}")
        weights, metadata = _read(file)
        if metadata.get("format") != _FORMAT:
            found = metadata.get("format", "no format")
            raise ValueError(f"{file}: expected {_FORMAT!r}, got {found!r}")
        try:
            self.configuration = from_json(metadata["configuration"])
            channels, height, width = json.loads(metadata["shape"])
            self.shape: tuple[int, int, int] = (int(channels), int(height), int(width))
            self.classes = tuple(str(name) for name in json.loads(metadata["classes"]))
            self.facts: dict[str, Any] = json.loads(metadata["facts"])
            # Before memory is taken for a network that a hostile file may describe as enormous.
            with torch.device("meta"):
                wanted = build(self.configuration, self.shape, len(self.classes)).state_dict()
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"{file}: its metadata cannot be used ({error})") from None
        _require_same(file, wanted, weights)
        self.model = build(self.configuration, self.shape, len(self.classes)).eval()
        _load_weights(file, self.model, weights)


def is_trained(path: Path) -> bool:
    """Whether a folder or file is what ``gramcert train`` wrote, by its own words."""
    file = path / MODEL if path.is_dir() else path
    if file.suffix != ".safetensors" or not file.is_file() or find_spec("safetensors") is None:
        return False
    try:
        return _metadata(file).get("format") == _FORMAT
    except ValueError:
        return False


def _require_same(file: Path, wanted: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """The same names, shapes and types; a weight of another type would be rounded, and not be what was trained."""
    if weights.keys() - wanted.keys():
        raise ValueError(f"{file}: {min(weights.keys() - wanted.keys())!r} is not part of this network")
    for name, tensor in wanted.items():
        shape, found = tuple(tensor.shape), weights.get(name)
        if found is None or tuple(found.shape) != shape:
            got = "nothing" if found is None else tuple(found.shape)
            raise ValueError(f"{file}: expected {name} of shape {shape}, got {got}")
        if found.dtype != tensor.dtype:
            raise ValueError(f"{file}: expected {name} of type {tensor.dtype}, got {found.dtype}")


def _load_weights(path: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path}: not the weights of this network ({str(error).splitlines()[-1].strip()})") from None
    bad = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ValueError(f"{path}: expected finite weights, got NaN or infinity in {bad[0]}")


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with opened_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _metadata(path: Path) -> dict[str, str]:
    with opened_safetensors(path) as file:
        return file.metadata() or {}
