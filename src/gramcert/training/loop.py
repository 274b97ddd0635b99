"""The training loop: deterministic, resumable, in one process or many."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.nn.head import NormalizedLinear
from gramcert.nn.losses import LogitAnnealing, OffsetCrossEntropy
from gramcert.training.augmentation import draw
from gramcert.training.checkpoints import (
    CONFIGURATION,
    MODEL,
    load_state,
    remove_unfinished,
    save_model,
    save_state,
    write_atomically,
)
from gramcert.training.configuration import Configuration, from_json
from gramcert.training.images import Images, Labelled
from gramcert.training.metrics import Metrics
from gramcert.training.networks import build
from gramcert.training.randomness import generator
from gramcert.training.schedule import learning_rate

# Radii, in units of 1/255, at which certified accuracy is usually given.
RADII = (36, 72, 108, 255)

EVALUATION_BATCH = 500

# Least time between two reports: reading the loss makes the processor wait for a GPU.
REPORT_SECONDS = 0.2


@dataclass(frozen=True)
class Step:
    """Where a run is, for whoever shows it."""

    step: int
    steps: int
    epoch: int
    loss: float
    record: dict[str, Any] | None = None


def train(
    configuration: Configuration,
    images: Images,
    folder: Path,
    *,
    report: Callable[[Step], None] = lambda step: None,
    checkpoint_seconds: float = 30.0,
) -> list[dict[str, Any]]:
    """Train, or go on with a run that was stopped, until the finished network is in ``folder``.

    The result depends on the configuration, the images and the number of processes and threads only, not on where a run
    was stopped: the order of images and their augmentation come from the seed and the step, and the state that is saved
    is complete. Started by ``torchrun``, the processes share each batch.

    Args:
        configuration: what to train.
        images: on what.
        folder: for the state, the metrics and the network; a folder with a run of another configuration is an error.
        report: called a few times a second and after each epoch, in the first process only.
        checkpoint_seconds: least time between two states on disk; each epoch ends with one in any case.

    Returns:
        One record per epoch.
    """
    engine = _engine(configuration)
    images = images.limited(configuration.images, configuration.holdout)
    share = _Share(configuration.batch, engine.process_index, engine.num_processes)
    epoch_steps = _steps_per_epoch(configuration, images)
    steps = epoch_steps * configuration.epochs
    network = build(configuration, images.shape, len(images.classes), images.channel_means())
    if engine.is_main_process:
        _claim(folder, configuration)
    engine.wait_for_everyone()
    adam = torch.optim.Adam(network.parameters(), configuration.lr, configuration.betas)
    start = steps if (folder / MODEL).exists() else 0  # without a state, whoever finished it may have removed it
    facts = load_state(folder, network, adam) or {"step": start, "loss": 0.0, "seconds": 0.0}
    model, optimizer = engine.prepare(network, adam)
    loss = _loss(configuration)
    started = time.monotonic() - facts["seconds"]
    saved = reported = time.monotonic()
    step, total = facts["step"], torch.tensor(facts["loss"], dtype=torch.float64, device=engine.device)
    with _metrics(engine, folder, step) as metrics:
        while step < steps:
            epoch, place = divmod(step, epoch_steps)
            if not place:
                total.zero_()
            batch = share.of(_order(configuration.seed, epoch, len(images.train)), place)
            x, labels = _batch(configuration, images.train[batch], step, share, engine.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(configuration, step, steps)
            optimizer.zero_grad()
            with engine.autocast():
                logits = model(x)
            value = loss(logits.float(), labels)
            engine.backward(value)
            optimizer.step()
            step += 1
            total += engine.reduce(value.detach().double(), "mean")  # of the whole batch, in every process
            record = None
            if place + 1 == epoch_steps:
                rate = learning_rate(configuration, step - 1, steps)
                record = {"epoch": epoch + 1, "step": step, "lr": rate, "loss": float(total) / epoch_steps}
                if not math.isfinite(record["loss"]):
                    raise ValueError(f"train({configuration.name}): the loss is {record['loss']} in epoch {epoch + 1}")
                if (epoch + 1) % configuration.evaluate_every == 0 or step == steps:
                    record |= evaluate(network, images.test, engine)
            if engine.is_main_process:
                if record is not None:
                    metrics.add(record)
                if record is not None or time.monotonic() - saved > checkpoint_seconds:
                    saved = time.monotonic()
                    facts = {"step": step, "loss": float(total), "seconds": saved - started}
                    save_state(folder, network, adam, facts)
                if record is not None or time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    report(Step(step, steps, epoch + 1, float(total) / (place + 1), record))
        records: list[dict[str, Any]] = metrics.records
    if engine.is_main_process and not (folder / MODEL).exists():
        facts = {"seconds": facts["seconds"], "steps": steps, "processes": engine.num_processes}
        save_model(folder, network, configuration, images.shape, images.classes, facts)
    engine.wait_for_everyone()
    return records


def evaluate(network: nn.Module, images: Labelled, engine: Any) -> dict[str, float]:
    """Clean accuracy, and what would be certified if every layer were exactly 1-Lipschitz and nothing were rounded.

    An estimate for curves during training; ``gramcert certify`` certifies. Processes share the images.
    """
    head = network[-1]  # type: ignore[index]
    assert isinstance(head, NormalizedLinear)
    counts = torch.zeros(1 + len(RADII), dtype=torch.float64, device=engine.device)
    was_training = network.training
    network.eval()
    with torch.no_grad():
        for start in range(
            engine.process_index * EVALUATION_BATCH, len(images), EVALUATION_BATCH * engine.num_processes
        ):
            part = images[slice(start, start + EVALUATION_BATCH)]
            logits = network(part.values().to(engine.device))
            right = logits.argmax(1).cpu() == part.labels
            radii = head.radius(logits).cpu()
            counts[0] += right.sum()
            for place, radius in enumerate(RADII, 1):
                counts[place] += (right & (radii > radius / 255)).sum()
    network.train(was_training)
    shares = (engine.reduce(counts, "sum") / len(images)).tolist()
    return {"clean": shares[0]} | {
        f"estimated_{radius}": share for radius, share in zip(RADII, shares[1:], strict=True)
    }


@dataclass(frozen=True)
class _Share:
    """Which part of each batch is this process's."""

    batch: int
    process: int
    processes: int

    def __post_init__(self) -> None:
        if self.batch % self.processes:
            raise ValueError(f"train(batch={self.batch}): expected a multiple of the {self.processes} processes")

    def of(self, whole: Tensor, place: int = 0) -> Tensor:
        """Of the batch at that place."""
        size = self.batch // self.processes
        start = place * self.batch + self.process * size
        return whole[start : start + size]


def _engine(configuration: Configuration) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError:
        raise ValueError("train: needs accelerate (pip install 'gramcert[train]')") from None
    AcceleratorState._reset_state()  # the precision of an earlier run in this process
    precision = {"float32": "no", "bfloat16": "bf16"}[configuration.precision]
    engine = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=precision)
    if engine.num_processes != int(os.environ.get("WORLD_SIZE", "1")):
        raise RuntimeError(f"train: {os.environ['WORLD_SIZE']} processes were started, {engine.num_processes} joined")
    return engine


def _steps_per_epoch(configuration: Configuration, images: Images) -> int:
    """Whole batches; what the images do not allow is an error before the folder is touched."""
    if configuration.batch > len(images.train):
        raise ValueError(f"train(batch={configuration.batch}): more than the {len(images.train)} training images")
    border, side = configuration.augmentation.crop, min(images.shape[1:])
    if border >= side:
        raise ValueError(f"train(augmentation.crop={border}): expected less than the {side} pixels of the images")
    return len(images.train) // configuration.batch


def _claim(folder: Path, configuration: Configuration) -> None:
    """Make the folder this run's; one that belongs to another configuration is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"train(out={folder}): not a folder that can be written ({error.strerror})") from None
    remove_unfinished(folder)
    path = folder / CONFIGURATION
    if path.exists():
        if from_json(path.read_text()) != configuration:
            raise ValueError(f"train(out={folder}): it holds a run of another configuration; choose another folder")
    elif any(folder.iterdir()):
        raise ValueError(f"train(out={folder}): expected an empty folder, or one with a run of this configuration")
    else:
        write_atomically(path, configuration.to_json().encode())


def _metrics(engine: Any, folder: Path, step: int) -> Any:
    if engine.is_main_process:
        return Metrics(folder, step)
    return _NoMetrics()


class _NoMetrics:
    records: tuple[()] = ()

    def __enter__(self) -> "_NoMetrics":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _loss(configuration: Configuration) -> nn.Module:
    if configuration.loss == "annealing":
        return LogitAnnealing(configuration.offset, configuration.temperature)
    return OffsetCrossEntropy(configuration.offset, configuration.temperature)


def _order(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "order", epoch))


def _batch(
    configuration: Configuration, part: Labelled, step: int, share: _Share, device: torch.device
) -> tuple[Tensor, Tensor]:
    numbers = share.of(draw(configuration.batch, generator(configuration.seed, "augmentation", step)))
    x = part.values().to(device)
    return configuration.augmentation(x, numbers.to(device)), part.labels.to(device)
