"""All methods on one layer, side by side with the truth."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, checked_iterations, require_finite
from gramcert.baselines.methods import Kind, Method, applicable_methods
from gramcert.baselines.reference import reference_norm
from gramcert.enclosure import Enclosure
from gramcert.geometry.convolution import Convolution
from gramcert.progress import Report, silent

# A method that has used this much time is not run again for a steadier timing.
REPEAT_SECONDS = 0.5


@dataclass(frozen=True)
class Row:
    """One method's answer.

    Attributes:
        name: the method.
        source: where it was published.
        value: its number, of an enclosure the upper end; ``None`` where it does not apply, for the reason in ``note``.
        lower: the lower end of an enclosure.
        relative_error: (value - truth)/truth, so negative below the truth; infinite where only the truth is 0.
        seconds: median time of one run.
        kind: what the value is for this padding and size.
        respected: whether the value is on the side of the truth that its kind promises, up to rounding; ``None`` for
            kinds that promise nothing.
        note: what it holds for, or why it was left out.
    """

    name: str
    source: str
    value: float | None
    lower: float | None
    relative_error: float | None
    seconds: float | None
    kind: Kind
    respected: bool | None
    note: str


@dataclass(frozen=True)
class Comparison:
    """The truth in float64, the time it took, the relative rounding allowed for, and one row per method."""

    truth: float
    truth_seconds: float
    tolerance: float
    rows: tuple[Row, ...]

    @property
    def all_respected(self) -> bool:
        """Whether no value lies on the wrong side of the truth for its kind."""
        return all(row.respected is not False for row in self.rows)


def compare_methods(
    layer: nn.Module | Convolution,
    input_size: Sizes,
    iterations: int = 6,
    *,
    tol: float = 1e-3,
    seed: int = 0,
    repeats: int = 3,
    truth: float | None = None,
    report: Report = silent,
) -> Comparison:
    """Run every applicable method on a layer and set it against the truth.

    Args:
        layer: stride 1, dilation 1, one group, zero or circular padding that keeps the input's size.
        input_size: one int per axis, or one int for all axes.
        iterations: number of Gram products of the methods that use them.
        tol: relative width of the enclosures.
        seed: of the random starts.
        repeats: how many runs the timing is the median of; slow methods run fewer times.
        truth: the norm, if it is known; otherwise it is computed first.
        report: told before each step its name, how many are done, and of how many.

    Example:
        >>> import torch, gramcert
        >>> from gramcert.baselines import compare_methods
        >>> layer = gramcert.Convolution(torch.ones(1, 1, 3, 3), padding="same")
        >>> comparison = compare_methods(layer, 8, iterations=1)
        >>> round(comparison.truth, 4), comparison.all_respected
        (8.2909, True)
    """
    description = Convolution.of(layer, call="compare_methods")
    sizes = axis_sizes("compare_methods", "input_size", input_size, description.axes)
    checked_iterations("compare_methods", iterations)
    axis_sizes("compare_methods", "repeats", repeats, 1)
    require_finite("compare_methods", "layer", description.kernel)
    _require_same_size(description, sizes)
    methods = applicable_methods(description, sizes, iterations, seed, tol)
    with torch.no_grad():
        report("the truth", 0, len(methods) + 1)
        start = time.perf_counter()
        known = reference_norm(description, sizes) if truth is None else truth
        truth_seconds = time.perf_counter() - start
        tolerance = rounding_allowance(description.kernel)
        rows = []
        for done, method in enumerate(methods, 1):
            report(method.name, done, len(methods) + 1)
            rows.append(_row(method, known, tolerance, repeats))
        report("done", len(methods) + 1, len(methods) + 1)
    return Comparison(known, truth_seconds, tolerance, tuple(rows))


def rounding_allowance(kernel: Tensor) -> float:
    """Relative error that rounding may cause: that of sums over all N weights of an output, which grows like √N."""
    return 8 * math.sqrt(kernel[0].numel()) * torch.finfo(kernel.dtype).eps


def _require_same_size(layer: Convolution, sizes: tuple[int, ...]) -> None:
    if layer.transposed or layer.groups != 1 or {*layer.stride, *layer.dilation} != {1}:
        raise ValueError(
            f"compare_methods(layer): expected stride 1, dilation 1, one group and no transposition, got stride "
            f"{layer.stride}, dilation {layer.dilation}, groups {layer.groups}, transposed {layer.transposed}"
        )
    if layer.padding_mode not in ("zeros", "circular") or layer.output_size(sizes) != sizes:
        raise ValueError(
            f"compare_methods(layer): expected zero or circular padding that keeps the size {sizes}, got "
            f"{layer.padding_mode} padding {layer.padding}"
        )


def _row(method: Method, truth: float, tolerance: float, repeats: int) -> Row:
    try:
        answer, seconds = _timed(method.run, repeats)
    except ValueError as reason:  # its hypothesis fails here; the arguments themselves have been checked
        return _left_out(method, str(reason))
    lower, value = (answer.lower, answer.upper) if isinstance(answer, Enclosure) else (None, answer.item())
    if not math.isfinite(value):
        return _left_out(method, "the value overflows")
    error = _relative_error(value, truth)
    respected = _respected(method.kind, error, tolerance)
    if lower is not None:
        respected = error >= -tolerance and _relative_error(lower, truth) <= tolerance
    return Row(method.name, method.source, value, lower, error, seconds, method.kind, respected, method.note)


def _left_out(method: Method, reason: str) -> Row:
    return Row(method.name, method.source, None, None, None, None, method.kind, None, f"left out: {reason}")


def _relative_error(value: float, truth: float) -> float:
    return (value - truth) / truth if truth else 0.0 if value == 0 else math.inf


def _respected(kind: Kind, error: float, tolerance: float) -> bool | None:
    if kind in ("estimate", "not a bound"):
        return None
    above, below = error >= -tolerance, error <= tolerance
    return {"upper bound": above, "enclosure": above, "lower bound": below, "exact": above and below}[kind]


def _timed(run: Callable[[], Tensor | Enclosure], repeats: int) -> tuple[Tensor | Enclosure, float]:
    times: list[float] = []
    while True:
        start = time.perf_counter()
        answer = run()
        times.append(time.perf_counter() - start)
        if len(times) >= repeats or sum(times) >= REPEAT_SECONDS:
            return answer, statistics.median(times)
