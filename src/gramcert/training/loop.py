"""The training loop: deterministic, resumable, in one process or many."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.nn.head import NormalizedLinear
from gramcert.nn.losses import LogitAnnealing, OffsetCrossEntropy
from gramcert.nn.residual import together
from gramcert.progress import Report, silent
from gramcert.training.augmentation import draw
from gramcert.training.checkpoints import (
    MODEL,
    claimed,
    load_state,
    save_model,
    save_state,
)
from gramcert.training.configuration import Configuration, named
from gramcert.training.images import Images, Labelled
from gramcert.training.metrics import Metrics
from gramcert.training.networks import build
from gramcert.training.randomness import generator
from gramcert.training.schedule import learning_rate

# Radii, in units of 1/255, at which certified accuracy is usually given.
RADII = (36, 72, 108, 255)

EVALUATION_BATCH = 500

# Time between two states on disk, in units of what saving one takes.
LEAST_SHARE = 20

# Least time between two reports: reading the loss makes the processor wait for a GPU.
REPORT_SECONDS = 0.2


def train(
    configuration: Configuration | str,
    images: Images,
    folder: str | Path,
    *,
    report: Report = silent,
    on_epoch: Callable[[dict[str, Any]], None] = lambda record: None,
    checkpoint_seconds: float = 30.0,
) -> list[dict[str, Any]]:
    """Train, or go on with a run that was stopped, until the finished network is in ``folder``.

    On a CPU the result depends on the configuration, the images and the number of processes and threads only, not on
    where a run was stopped: the order of images and their augmentation come from the seed and the step, and the state
    that is saved is complete. (Some of torch's functions on GPUs sum in any order.) Started by ``torchrun``, the
    processes share each batch.

    Args:
        configuration: what to train, or the name of one; see :mod:`gramcert.training.configuration`.
        images: on what; see :func:`gramcert.training.images.load_images`.
        folder: for the state, the metrics and the network; a folder with a run of another configuration is an error.
        report: told the epoch and its mean loss so far, the steps that are done, and of how many; a few times a second
            and after each epoch, in the first process only.
        on_epoch: called with the record of each epoch that has ended, there too.
        checkpoint_seconds: least time between two states on disk, longer where saving itself takes long; each epoch
            ends with one in any case. 0 saves after every step.

    Returns:
        One record per epoch: step, learning rate, mean loss and, where it was evaluated, clean accuracy and estimates
        of the certified one. The network is ``gramcert.training.checkpoints.Trained(folder).model``.
    """
    configuration, folder = _checked(configuration, images, folder)
    with ExitStack() as stack:
        engine = stack.enter_context(_engine(configuration))
        images = images.limited(configuration.images, configuration.holdout)
        batches = _Batches(configuration, images, engine)
        steps = batches.per_epoch * configuration.epochs
        network = build(configuration, images.shape, len(images.classes), images.channel_means())
        fresh: dict[str, Any] = {"step": 0, "loss": 0.0, "seconds": 0.0, "images": images.digest()}
        _require_same_run(engine, configuration.to_json() + fresh["images"])
        _claim(engine, stack, folder, configuration)
        adam = torch.optim.Adam(network.parameters(), configuration.lr, configuration.betas)
        if (folder / MODEL).exists():  # without a state, whoever finished it may have removed it
            fresh["step"] = steps
        state = load_state(folder, network, adam, steps)
        facts = fresh if state is None else state
        if facts.get("images") != fresh["images"]:
            raise ValueError(f"train(folder={folder}): its run was begun with other images; choose another folder")
        _require_same_step(engine, facts["step"])
        model, optimizer = engine.prepare(network, adam)
        loss = _loss(configuration)
        started, saved, reported = time.monotonic() - facts["seconds"], time.monotonic(), time.monotonic()
        step, total = facts["step"], torch.tensor(facts["loss"], dtype=torch.float64, device=engine.device)
        took = 0.0  # by the last saving, which must not take all the time of large networks
        if engine.is_main_process:
            report(_epoch_of(configuration, min(step // batches.per_epoch + 1, configuration.epochs)), step, steps)
        with Metrics(folder, step, steps) if engine.is_main_process else nullcontext() as metrics:
            while step < steps:
                epoch, place = divmod(step, batches.per_epoch)
                if not place:
                    total.zero_()
                rate = learning_rate(configuration, step, steps)
                total += _update(engine, model, optimizer, loss, rate, *batches.at(epoch, place))
                step += 1
                record = None
                if place + 1 == batches.per_epoch:
                    record = {"epoch": epoch + 1, "step": step, "lr": rate, "loss": float(total) / batches.per_epoch}
                    _finite(record["loss"], epoch)
                    if (epoch + 1) % configuration.evaluate_every == 0 or step == steps:
                        record |= evaluate(network, images.test, engine)
                if metrics is None:
                    continue
                if record is not None:
                    metrics.add(record)
                wait = max(checkpoint_seconds, LEAST_SHARE * took) if checkpoint_seconds > 0 else -1.0
                if record is not None or time.monotonic() - saved > wait:
                    begun = time.monotonic()
                    facts |= {"step": step, "loss": _finite(float(total), epoch), "seconds": begun - started}
                    save_state(folder, network, adam, facts)
                    saved = time.monotonic()
                    took = saved - begun
                if record is not None or time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    mean = float(total) / (place + 1)
                    report(f"{_epoch_of(configuration, epoch + 1)}, loss {mean:.4f}", step, steps)
                if record is not None:
                    on_epoch(record)
        if engine.is_main_process and not (folder / MODEL).exists():
            done = {"seconds": facts["seconds"], "steps": steps, "processes": engine.num_processes}
            save_model(folder, network, configuration, images.shape, images.classes, done)
        engine.wait_for_everyone()
    return [] if metrics is None else metrics.records


def _checked(configuration: Configuration | str, images: Images, folder: str | Path) -> tuple[Configuration, Path]:
    """What a caller passed, if it is of the right kind."""
    found = named(configuration) if isinstance(configuration, str) else configuration
    if not isinstance(found, Configuration):
        raise TypeError(f"train(configuration): expected a Configuration or its name, got {type(found).__name__}")
    if not isinstance(images, Images):
        raise TypeError(f"train(images): expected Images, as load_images gives them, got {type(images).__name__}")
    if not isinstance(folder, (str, Path)):
        raise TypeError(f"train(folder): expected a path, got {type(folder).__name__}")
    return found, Path(folder)


def _epoch_of(configuration: Configuration, epoch: int) -> str:
    return f"epoch {epoch:{len(str(configuration.epochs))}}/{configuration.epochs}"


def _update(
    engine: Any, model: nn.Module, optimizer: Any, loss: nn.Module, rate: float, x: Tensor, labels: Tensor
) -> Tensor:
    """One step of Adam; the loss of the whole batch, in every process."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    with together(model), engine.autocast():
        logits = model(x)
    value = loss(logits.float(), labels)
    engine.backward(value)
    optimizer.step()
    mean: Tensor = engine.reduce(value.detach().double(), "mean")
    return mean


def evaluate(network: nn.Module, images: Labelled, engine: Any) -> dict[str, float]:
    """Clean accuracy, and what would be certified if every layer were exactly 1-Lipschitz and nothing were rounded.

    An estimate for curves during training; ``gramcert certify`` certifies. Processes share the images.
    """
    head = network[-1]  # type: ignore[index]
    assert isinstance(head, NormalizedLinear)
    counts = torch.zeros(1 + len(RADII), dtype=torch.int64, device=engine.device)
    was_training = network.training
    network.eval()
    with torch.no_grad(), together(network):
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
    shares = (engine.reduce(counts, "sum").cpu().double() / len(images)).tolist()
    return {"clean": shares[0]} | {
        f"estimated_{radius}": share for radius, share in zip(RADII, shares[1:], strict=True)
    }


class _Batches:
    """This process's part of every batch, with its augmentation; what the images do not allow is an error."""

    def __init__(self, configuration: Configuration, images: Images, engine: Any) -> None:
        self.configuration, self.train, self.device = configuration, images.train, engine.device
        batch, count, processes = configuration.batch, len(images.train), engine.num_processes
        if batch > count:
            raise ValueError(f"train(batch={batch}): more than the {count} training images")
        if batch % processes:
            raise ValueError(f"train(batch={batch}): expected a multiple of the {processes} processes")
        border, side = configuration.augmentation.crop, min(images.shape[1:])
        if border >= side:
            raise ValueError(f"train(augmentation.crop={border}): expected less than the {side} pixels of the images")
        self.per_epoch = count // batch  # whole batches
        self.share = slice(engine.process_index * batch // processes, (engine.process_index + 1) * batch // processes)
        self.epoch, self.order = -1, torch.empty(0)

    def at(self, epoch: int, place: int) -> tuple[Tensor, Tensor]:
        """Images and labels of the batch at that place of the epoch."""
        seed, size = self.configuration.seed, self.configuration.batch
        if epoch != self.epoch:
            self.epoch, self.order = epoch, torch.randperm(len(self.train), generator=generator(seed, "order", epoch))
        part = self.train[self.order[place * size : (place + 1) * size][self.share]]
        step = epoch * self.per_epoch + place
        numbers = draw(size, generator(seed, "augmentation", step))[self.share]
        x = self.configuration.augmentation(part.values().to(self.device), numbers.to(self.device))
        return x, part.labels.to(self.device)


@contextmanager
def _engine(configuration: Configuration) -> Iterator[Any]:
    """Processes, device and precision. The group of the processes ends with it, unless the caller had made it."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import GradientAccumulationPlugin
    except ImportError:
        raise ValueError("train: needs accelerate (pip install 'gramcert[train]')") from None
    joined = torch.distributed.is_initialized()
    AcceleratorState._reset_state()  # the precision of an earlier run in this process
    precision = {"float32": "no", "bfloat16": "bf16"}[configuration.precision]
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == "cuda":
        # float32 means float32, above all in the rescaling, which is matrix products.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    # Apple's GPUs have no float64, which the rescaling needs.
    on_cpu = device is None or device.type == "mps"
    # Said, because the environment could say otherwise, which would divide the loss.
    whole = GradientAccumulationPlugin(num_steps=1)
    engine = Accelerator(cpu=on_cpu, mixed_precision=precision, gradient_accumulation_plugin=whole)
    if engine.num_processes != int(os.environ.get("WORLD_SIZE", "1")):
        raise RuntimeError(f"train: {os.environ['WORLD_SIZE']} processes were started, {engine.num_processes} joined")
    yield engine
    # A process that ends while threads of the group are at work may be aborted, and torchrun then kills the others. Not
    # after an error, when others may wait for this process for ever.
    if torch.distributed.is_initialized() and not joined:
        torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)  # which holds that the group exists


def _loss(configuration: Configuration) -> nn.Module:
    if configuration.loss == "annealing":
        return LogitAnnealing(configuration.offset, configuration.temperature)
    return OffsetCrossEntropy(configuration.offset, configuration.temperature)


def _finite(loss: float, epoch: int) -> float:
    """Refuse to go on with a network that is lost; the last good state remains."""
    if not math.isfinite(loss):
        raise ValueError(f"train, epoch {epoch + 1}: expected a finite loss, got {loss}; a smaller lr may help")
    return loss


def _claim(engine: Any, stack: ExitStack, folder: Path, configuration: Configuration) -> None:
    """The first process claims the folder; if it may not, the others leave too."""
    refusal: ValueError | None = None
    if engine.is_main_process:
        try:
            stack.enter_context(claimed(folder, configuration))
        except ValueError as error:
            refusal = error
    refused = bool(engine.gather(torch.tensor([refusal is not None], device=engine.device)).any())
    if refused:
        raise refusal or ValueError("train: the first process was refused its folder")


def _require_same_run(engine: Any, description: str) -> None:
    """All processes must have been given the same."""
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:7], "big")
    if len(set(engine.gather(torch.tensor([digest], device=engine.device)).tolist())) > 1:
        raise ValueError("train: the processes were given different configurations or images")


def _require_same_step(engine: Any, step: int) -> None:
    """All processes must have read the same state: on several machines, from a folder that they share."""
    steps = engine.gather(torch.tensor([step], device=engine.device)).tolist()
    if len(set(steps)) > 1:
        raise ValueError(f"train: the processes found states of steps {sorted(set(steps))}; expected a shared folder")
