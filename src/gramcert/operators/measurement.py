"""Measurements: the certified norm of one linear map, or the constant of one residual layer.

Each is independent of all others, knows a digest of everything it depends on, and so can be made in another process and
kept in a cache.
"""

import abc
import dataclasses
import functools
import hashlib
import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramcert.certified.deployed import ResidualParts, refined, residual_norms
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.tapwise import TapwiseLayer
from gramcert.certified.work import Work
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.reduction import reduced_kernels
from gramcert.operators.linear import LinearMap, Move
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.rounding import checked_arithmetic, down, root_down, up

# Changes whenever a measurement of the same map may give another result.
FORMAT = 2

MAX_BYTES = 2**31

# Entries of a vector that is kept as a witness.
MOST_WITNESS = 2**17

# Frequencies per axis and values in the picture of a spectrum.
PROFILE_GRID, PROFILE_VALUES = 8, 64


@dataclass(frozen=True)
class Measured:
    """What a measurement found.

    Attributes:
        lower: certified, ``None`` where only an upper bound is known.
        upper: certified.
        method: how it was proved.
        notes: such as why the tolerance was missed.
        seconds: that it took.
        profile: singular values on some frequencies, an estimate.
        witness: a vector of small integers, flat, that is stretched by at least ``witnessed``; or ``None``.
        witnessed: certified.
        norms: of the two maps of a residual layer, certified upper bounds.
        cached: whether it was known before.
        stopped: what kept it from being known better, if that was a limit and not rounding.
    """

    lower: float | None
    upper: float
    method: str
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    profile: tuple[float, ...] = ()
    witness: Tensor | None = field(default=None, compare=False)
    witnessed: float = 0.0
    norms: tuple[float, float] | None = None
    cached: bool = False
    stopped: str = field(default="", compare=False)


class Measurement(abc.ABC):
    """Something to be measured."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """For people."""

    @property
    @abc.abstractmethod
    def geometry(self) -> str:
        """For people."""

    @property
    @abc.abstractmethod
    def is_instant(self) -> bool:
        """Whether it is known in closed form, and not worth a cache."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """Of everything that the result depends on."""

    @abc.abstractmethod
    def run(self, tol: float, max_seconds: float | None) -> Measured:
        """Measure."""

    def key(self, tol: float) -> str:
        """Under which the result is kept."""
        return hashlib.sha256(f"{FORMAT} {tol!r} {self.digest}".encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Norm(Measurement):
    """The norm of a linear map."""

    map: LinearMap

    @property
    def kind(self) -> str:
        """That of the map."""
        return self.map.kind

    @property
    def geometry(self) -> str:
        """That of the map."""
        return self.map.geometry

    @property
    def is_instant(self) -> bool:
        """Moves, factors, and matrices whose rows or columns share no place."""
        if 0 in (*self.map.source, *self.map.target):
            return True
        if isinstance(self.map, Convolve):
            return False
        return not isinstance(self.map, AxisMatrix) or self.map.disjoint_norm is not None

    @property
    def digest(self) -> str:
        """That of the map."""
        return self.map.digest

    def run(self, tol: float, max_seconds: float | None = None) -> Measured:
        """In closed form, or by :func:`gramcert.spectral_norm`, and the error of the stored numbers on top."""
        start = time.perf_counter()
        linear = self.map
        if 0 in (*linear.source, *linear.target):
            return Measured(0.0, 0.0, "nothing goes in, or nothing comes out")
        if isinstance(linear, Move):
            root = math.isqrt(linear.repetition)
            lower = float(root) if root * root == linear.repetition else root_down(linear.repetition)
            return Measured(lower, linear.size, "how often entries occur")
        if isinstance(linear, AxisMatrix) and linear.disjoint_norm is not None:
            lower, upper = linear.disjoint_norm
            return self._widened(Measured(lower, upper, "the largest row or column, which share no place"))
        if not isinstance(linear, (AxisMatrix, Convolve)):
            return self._widened(Measured(linear.size, linear.size, "the largest factor"))
        layer: Convolution | Tensor = linear.layer if isinstance(linear, Convolve) else linear.matrix
        size = linear.input_size if isinstance(linear, Convolve) else None
        work = Work(MAX_BYTES, max_seconds, call="audit")
        found = refined("audit", layer, size, tol, work)
        profile = _profile(linear.layer) if isinstance(linear, Convolve) else ()
        witness = None
        if work.witness is not None and work.witness.numel() <= MOST_WITNESS:
            witness = (work.witness.flatten() * (127 / work.witness.abs().max())).round().to(torch.int8)
        seconds = time.perf_counter() - start
        proved = 0.0 if witness is None else witnessed_lower(linear, witness)
        return self._widened(
            Measured(
                found.lower,
                found.upper,
                found.method,
                found.notes,
                seconds,
                profile,
                witness,
                proved,
                stopped="" if found.tol_reached else work.stopped,
            )
        )

    def _widened(self, found: Measured) -> Measured:
        error = self.map.error
        if not error or found.lower is None:
            return found
        lower, upper = max(0.0, down(found.lower - error)), up(found.upper + error)
        return dataclasses.replace(found, lower=lower, upper=upper)


@dataclass(frozen=True, eq=False)
class NormOfLayer(Measurement):
    """The norm of a convolution at one input size or at every one, or of a matrix.

    Attributes:
        layer: as it is stored.
        input_size: ``None`` for every size.
        meant: what its norm was made for, near which it is known better.
    """

    layer: Convolution
    input_size: tuple[int, ...] | None = None
    meant: float = 1.0

    @property
    def kind(self) -> str:
        """For people."""
        return "layer"

    @property
    def geometry(self) -> str:
        """Channels and taps."""
        return f"{self.layer.in_channels}→{self.layer.out_channels}, {'×'.join(map(str, self.layer.kernel_size))}"

    @property
    def is_instant(self) -> bool:
        """It takes a proof."""
        return False

    @functools.cached_property
    def digest(self) -> str:
        """Of the kernel, the geometry and the size."""
        layer = self.layer
        geometry = (layer.stride, layer.padding, layer.padding_mode, layer.dilation, layer.groups, layer.transposed)
        facts = ("layer", geometry, layer.output_padding, self.input_size, self.meant, tuple(layer.kernel.shape))
        sha = hashlib.sha256(repr(facts).encode())
        sha.update(layer.kernel.detach().cpu().double().contiguous().numpy().tobytes())
        return sha.hexdigest()

    def run(self, tol: float, max_seconds: float | None = None) -> Measured:
        """See :func:`gramcert.certified.deployed.refined`."""
        work = Work(MAX_BYTES, max_seconds, call="lipschitz_bound")
        found = refined("lipschitz_bound", self.layer, self.input_size, tol, work, self.meant)
        stopped = "" if found.tol_reached else work.stopped
        return Measured(found.lower, found.upper, found.method, found.notes, stopped=stopped)


@dataclass(frozen=True, eq=False)
class ResidualLayer(Measurement):
    r"""The constant of x - Vᵀφ(Wx + b) with V near 2R²W, by the theorem of the residual layer.

    Attributes:
        inner: W, of stride 1 with zero padding; a matrix as a convolution with one tap.
        outer: V in the layout of W.
        input_size: of a convolution.
    """

    inner: Convolution
    outer: Tensor
    input_size: tuple[int, ...] | None

    @property
    def kind(self) -> str:
        """For people."""
        return "residual layer"

    @property
    def geometry(self) -> str:
        """Channels, inner channels, taps."""
        hidden, channels, *taps = self.inner.kernel.shape
        at = "" if self.input_size is None else f", at {'×'.join(map(str, self.input_size))}"
        shape = f", {'×'.join(map(str, taps))}" if self.input_size is not None else ""
        return f"{channels}→{hidden}→{channels}{shape}{at}"

    @property
    def is_instant(self) -> bool:
        """It takes two norms."""
        return False

    @functools.cached_property
    def digest(self) -> str:
        """Of both kernels and the geometry; computed once."""
        sha = hashlib.sha256(repr(("residual", self.inner.padding, self.input_size, self.outer.shape)).encode())
        for tensor in (self.inner.kernel, self.outer):
            sha.update(tensor.detach().double().contiguous().numpy().tobytes())
        return sha.hexdigest()

    def factors(self) -> Tensor:
        """R with V ≈ 2R²W, by least squares for each inner channel; any positive R is valid."""
        inner, outer = self.inner.kernel.double().flatten(1), self.outer.double().flatten(1)
        squares = (inner * outer).sum(1) / (2 * inner.square().sum(1)).clamp_min(1e-300)
        return squares.clamp_min(0.0).sqrt()

    @property
    def fits(self) -> bool:
        """Whether V is 2R²W to within a per cent, so that the theorem is worth asking."""
        outer = self.outer.double().flatten(1)
        ideal = 2 * self.factors().square()[:, None] * self.inner.kernel.double().flatten(1)
        return float((outer - ideal).norm()) <= 1e-2 * float(outer.norm())

    def run(self, tol: float, max_seconds: float | None = None) -> Measured:
        """See :class:`gramcert.certified.deployed.ResidualParts`; norms near 1 are refined as far as possible."""
        start = time.perf_counter()
        parts = ResidualParts.of(self.inner, self.outer, self.factors())
        work = Work(MAX_BYTES, max_seconds, call="audit")
        scaled, spread = residual_norms("audit", parts, self.input_size, tol, work)
        notes = scaled.notes if scaled.notes or not work.stopped else spread.notes
        norms = scaled.upper, spread.upper
        method = "theorem of the residual layer: slopes of φ in [0, 1], WᵀW ⪯ R⁻²"
        profile = _profile(self.inner) if self.input_size is not None else ()
        seconds = time.perf_counter() - start
        stopped = "" if scaled.tol_reached and spread.tol_reached else work.stopped
        return Measured(None, parts.constant(*norms), method, notes, seconds, profile, norms=norms, stopped=stopped)


def witnessed_lower(linear: LinearMap, witness: Tensor) -> float:
    """Lower bound of the norm of a convolution or matrix from what it, or its adjoint, does to one vector."""
    assert isinstance(linear, (AxisMatrix, Convolve))
    layer = linear.layer if isinstance(linear, Convolve) else Convolution(linear.matrix[:, :, None])
    size = linear.input_size if isinstance(linear, Convolve) else (1,)
    with checked_arithmetic("audit"):
        lifted = LiftedLayer.of(layer, layer_axes(layer, size, "audit"))
        if lifted.is_zero or lifted.axes is None:
            return 0.0
        taps = TapwiseLayer(lifted.kernels, lifted.axes)
        lower = taps.norm_below(witness.double().reshape(taps.input_shape))
    return max(0.0, down(lifted.bounds(lower, math.inf)[0] - linear.error))


def _profile(layer: Convolution) -> tuple[float, ...]:
    """Singular values of the symbol on a coarse grid, descending, thinned out: for a picture."""
    kernels = layer.kernel.detach().double()
    kernels = kernels.reshape(layer.groups, -1, *kernels.shape[1:])[:PROFILE_VALUES]
    with torch.no_grad():
        reduced = reduced_kernels(kernels, layer.stride, layer.dilation)
        axes = tuple(range(3, reduced.dim()))
        grid = max(2, round(PROFILE_GRID ** (2 / len(axes))))
        wrapped = reduced
        for axis in axes:  # a kernel longer than the grid wraps around it
            count = -(-wrapped.shape[axis] // grid) * grid
            wrapped = torch.nn.functional.pad(wrapped.movedim(axis, -1), (0, count - wrapped.shape[axis]))
            wrapped = wrapped.unflatten(-1, (-1, grid)).sum(-2).movedim(-1, axis)
        symbols = torch.fft.fftn(wrapped, dim=axes).movedim((1, 2), (-2, -1))
        # The picture is not worth more than the proof, and shows no infinity.
        if min(symbols.shape[-2:]) > 256 or not bool(symbols.isfinite().all()):
            return ()
        values = torch.linalg.svdvals(symbols).flatten().sort(descending=True).values
    chosen = torch.linspace(0, len(values) - 1, min(PROFILE_VALUES, len(values))).round().long()
    return tuple(values[chosen].tolist())
