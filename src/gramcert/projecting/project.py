"""``project``: the nearest weights whose norm is proved to be at most a number."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, checked_norm, require_values
from gramcert.certified.choose import certified_convolution, enclose
from gramcert.certified.work import Work
from gramcert.geometry.axis import Axis, layer_axes
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.reduction import every_size_square, one_size_bound
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.projecting.nearest import Nearest, nearest, top_values
from gramcert.projecting.sampled import Places, Sampling, sampling_grid

# The search stops when what it has is this near to the least distance, as a part of it.
GAP = 0.02

# Finer tolerances than this, and weights farther above the norm, are searched in float64.
FINE, FAR = 1e-5, 1e3

# Of weights still farther above, floats do not see the singular values near the norm: they are only scaled.
FARTHEST = 1e12

# Levels on the grid are lowered to this part at most.
MOST_MISSED = 0.9

# At one input size the constraint on the grid asks for more than the norm does; it is relaxed so often.
ROUNDS = 3

# Roundings of the weights that the first scaling leaves room for, but no more than this part of the tolerance; each
# further one twice as many. After so many scalings the room is everything: the kernel is zero, of norm 0.
ROOM, SCALINGS = 16, 60


def project(
    layer: nn.Module | Convolution | Tensor,
    norm: float = 1.0,
    input_size: Sizes | None = None,
    *,
    steps: int = 40,
    tol: float = 1e-3,
    max_bytes: int = 2**31,
) -> Tensor:
    r"""Weights near those of a layer with which its spectral norm is proved to be at most ``norm``.

    What is returned was proved: with these weights ``spectral_norm(layer, input_size, tol=tol).upper <= norm``, all
    rounding included, that of the weights to their own type too. How near they are is a matter of search: with enough
    steps, about the nearest in the Frobenius norm, and but for rounding never farther than the weights divided by their
    norm. A layer that is proved to be within ``norm`` keeps its weights.

    Args:
        layer: ``nn.Linear``, ``nn.Conv1d/2d/3d``, ``nn.ConvTranspose1d/2d/3d``, a :class:`Convolution` or a real
            matrix; of a parametrised layer, the weight that it computes. It is not changed.
        norm: what the norm may be at most, a positive number. (With 0 only the zero kernel would be left.)
        input_size: the one size that the layer is used at, or ``None`` for every size.
        steps: most steps of the search; a few are quick, and nearly all of the way.
        tol: relative width of the proof. The last scaling loses about that much.
        max_bytes: most memory of the proof. The search takes up to about 1 GiB, for the widest layers.

    Returns:
        A new tensor of the shape, the type and on the device of the layer's weight, without gradient; of a
        :class:`Convolution`, which keeps half precision in float32, in float32.

    Example:
        >>> import torch, gramcert
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.Conv2d(16, 16, 3, padding=1)
        >>> before = gramcert.spectral_norm(layer)
        >>> weight = gramcert.project(layer, 0.9)
        >>> distance = torch.dist(weight, layer.weight) / torch.dist(layer.weight * 0.9 / before.upper, layer.weight)
        >>> _ = layer.weight.data.copy_(weight)
        >>> before > 1.1, gramcert.spectral_norm(layer).upper <= 0.9, bool(distance < 0.6)
        (True, True, True)
    """
    return Projection("project", norm, steps, tol, max_bytes)(layer, input_size)


class Projection:
    """:func:`project` with its arguments checked, for one call or many."""

    def __init__(self, call: str, norm: float, steps: int, tol: float, max_bytes: int) -> None:
        self.call = call
        self.norm = checked_norm(call, norm)
        self.steps = checked_steps(call, steps)
        self.tol, self.max_bytes = tol, max_bytes

    def __call__(self, layer: nn.Module | Convolution | Tensor, input_size: Sizes | None = None) -> Tensor:
        """The projected weights of a layer."""
        weight: Tensor = stored_weight(layer)
        if isinstance(weight, Tensor) and weight.is_complex():
            raise TypeError(f"{self.call}(layer): expected real weights, got {weight.dtype}")
        description = certified_convolution(self.call, layer)
        kernel = require_values(self.call, "layer", description.kernel).detach()
        with torch.no_grad():
            before = self.upper(layer, input_size)
            if before <= self.norm:
                return weight.detach().clone()
            candidate = _Candidate(self, description.with_kernel(kernel), weight, input_size, before)
            return candidate.proved()

    def upper(self, layer: nn.Module | Convolution | Tensor, input_size: Sizes | None) -> float:
        """A proved bound of the norm, which is finite."""
        upper = enclose(self.call, layer, input_size, self.tol, Work(self.max_bytes, None, call=self.call)).upper
        if not math.isfinite(upper):
            raise ValueError(f"{self.call}(layer): no finite bound of its norm, so that nothing can be proved")
        return upper


class _Candidate:
    """One layer on its way: weights that are searched for, scaled, rounded and proved."""

    def __init__(
        self, asked: Projection, layer: Convolution, weight: Tensor, input_size: Sizes | None, before: float
    ) -> None:
        self.asked, self.layer, self.weight, self.before = asked, layer, weight, before
        self.kernel = layer.kernel.double()
        self.size: tuple[int, ...] | None = None
        self.axes: tuple[Axis, ...] | None = None
        self.read: Tensor | None = None
        self._proved: tuple[Tensor, float] | None = None  # the last kernel, and its bound
        if input_size is not None:
            self.size = axis_sizes(asked.call, "input_size", input_size, layer.axes)
            self.axes = layer_axes(layer, self.size, asked.call)
            self.read = _read(self.axes).to(layer.kernel.device)

    def proved(self) -> Tensor:
        """The nearest weights that were found, or the scaled ones if these are nearer."""
        scaled = self._scaled(self.kernel, self.asked.norm / self.before)
        found = self._brought_inside(self._searched())
        if float((found - self.kernel).norm()) > float((scaled - self.kernel).norm()):
            found = self._brought_inside(scaled)
        return found.reshape(self.weight.shape).to(self.weight.dtype)

    def _searched(self) -> Tensor:
        """Where the search ends, brought back towards the weights where its norm is less than it may be."""
        norm = self.asked.norm
        if self.before > FARTHEST * norm:
            return self._scaled(self.kernel, norm / self.before)
        grid, level = constraint(self.layer, self.axes, norm)
        # At every size the norm and the level on the grid belong together, and a peak between frequencies is seen.
        peak = self.before * level / norm if self.axes is None else None
        for _ in range(1 if self.axes is None else ROUNDS):
            kernel, _ = search(
                self.layer, self.axes, grid, level, self.asked.steps, GAP, fine=self._is_fine(), peak=peak
            )
            if not bool(torch.isfinite(kernel).all()):
                return self._scaled(self.kernel, 0.0)
            upper = self._upper(self._rounded(kernel))
            if upper >= norm * (1 - self.asked.tol):
                return kernel
            level *= norm / upper
        # The norm is convex: on the way from here to the weights it is at most what a straight line says.
        part = (norm - upper) / (self.before - upper)
        return kernel + part * (self.kernel - kernel)

    def _is_fine(self) -> bool:
        return self.asked.tol < FINE or self.before > FAR * self.asked.norm or max(self.layer.kernel_size) == 1

    def _brought_inside(self, kernel: Tensor) -> Tensor:
        """The kernel, scaled and rounded until it is proved; in float64, with the values of its own type."""
        room = min(ROOM * torch.finfo(self.weight.dtype).eps, self.asked.tol / ROOM)
        kernel = self._rounded(kernel)
        for _ in range(SCALINGS):
            upper = self._upper(kernel)
            if upper <= self.asked.norm:
                return kernel
            kernel = self._rounded(self._scaled(kernel, self.asked.norm / upper * max(0.0, 1 - room)))
            room *= 2
        raise ValueError(f"{self.asked.call}(norm={self.asked.norm}): no weights of {self.weight.dtype} were proved")

    def _scaled(self, kernel: Tensor, factor: float) -> Tensor:
        """The kernel times a factor, but for taps that make no difference at this size."""
        return kernel * factor if self.read is None else torch.where(self.read, kernel * factor, kernel)

    def _upper(self, kernel: Tensor) -> float:
        if self._proved is None or not torch.equal(self._proved[0], kernel):
            stored = kernel.to(self.layer.kernel.dtype)
            self._proved = kernel, self.asked.upper(self.layer.with_kernel(stored), self.size)
        return self._proved[1]

    def _rounded(self, kernel: Tensor) -> Tensor:
        return kernel.to(self.weight.dtype).double()


def constraint(layer: Convolution, axes: tuple[Axis, ...] | None, norm: float) -> tuple[FrequencyGrid, float]:
    """A grid and a level such that singular values up to it on the grid mean a norm of at most about ``norm``.

    For every size that is a grid fine enough to stand for all frequencies; for one size, the circulant that contains
    the layer, where it has no more frequencies than that grid.
    """
    places = Places(layer)
    grid = sampling_grid(places.taps, places.hold[0].numel())
    if axes is None:
        return grid, norm / math.sqrt(every_size_square(layer))
    bound = one_size_bound(axes)
    own = bound.grids[-1]
    smaller = all(size <= fine for size, fine in zip(own.sizes, grid.sizes, strict=True))
    return own if smaller else grid, norm / bound.factor


def search(
    layer: Convolution,
    axes: tuple[Axis, ...] | None,
    grid: FrequencyGrid,
    level: float,
    steps: int,
    gap: float,
    *,
    fine: bool,
    peak: float | None = None,
) -> tuple[Tensor, Nearest]:
    """The kernel nearest to that of a layer with singular values up to a level on a grid, in float64, and its search.

    Taps that no output reads the input with, at one size, stay what they are. Where the largest singular value over all
    frequencies, ``peak``, is known and the grid has missed it, the level is lowered by that ratio: what is above the
    level between frequencies is then above it on the grid.
    """
    places = Places(layer, None if axes is None else _read(axes))
    kernel = layer.kernel.detach().double()
    matrices = places.gather(kernel / level).to(torch.float64 if fine else torch.float32)
    sampling = Sampling.on(grid, places.taps, matrices)
    tops = top_values(matrices, sampling)
    if peak is not None:
        missed = max(MOST_MISSED, min(1.0, float(tops.amax()) * level / peak))
        matrices, tops, level = matrices / missed, tops / missed, level * missed
    found = nearest(matrices, places.hold, sampling, tops, steps, gap)
    # Only the change has passed through the precision of the search.
    change = (found.matrices - matrices).double() * level
    return places.scatter(places.gather(kernel) + change, kernel), found


def _read(axes: tuple[Axis, ...]) -> Tensor:
    read = torch.ones((), dtype=torch.bool)
    for axis in axes:
        read = read[..., None] & axis.reads()
    return read


def stored_weight(layer: Any) -> Any:
    """The tensor that holds the weights of a layer; anything else as it is, for the checks that follow."""
    if isinstance(layer, Convolution):
        return layer.kernel
    return layer.weight if isinstance(layer, nn.Module) and hasattr(layer, "weight") else layer


def checked_steps(call: str, steps: int) -> int:
    """At least one step."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"{call}(steps): expected an int, got {steps!r}")
    if steps < 1:
        raise ValueError(f"{call}(steps={steps}): expected at least 1")
    return steps
