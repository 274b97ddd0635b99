r"""Vectors for the proof of :mod:`gramcert.certified.embedded`. Nothing here is certified, and nothing needs to be.

A circulant maps frequency by frequency, and the inside of the layer is a product of intervals: so products with the
layer are Fourier transforms, small matrix products, and setting to zero what is outside. The *small* side is that of
the inputs or of the outputs with fewer channels, B the circulant from it to the other one: B*B has the order of G(ω).

Vectors are arrays (*places, channels, count), so that a Fourier transform is a matrix product along the first axes and
what it gives is ready for the products at each frequency.
"""

import math

import torch
from torch import Tensor

from gramcert.certified.embedding import Embedding
from gramcert.certified.work import Work
from gramcert.geometry.symbol import COMPLEX, symbols, taps_first

# Steps of block conjugate gradients at most.
MOST_STEPS = 200

# Vectors that are worked on together at least: a few more than needed cost little, and speed up convergence.
BLOCK = 16

# Directions that new ones are made conjugate to: in exact arithmetic those of one step would be enough.
REMEMBERED = 384

# Steps without progress after which it is given up.
PATIENCE = 25

# What squares of lengths and energies are known to, relatively: smaller directions of a block are left out.
DEPENDENT = {torch.float32: 1e-5, torch.float64: 1e-12}

# Frequencies whose matrices are factorised at a time.
PORTION = 64

NAME = "vectors for the circulant"


class Deflation:
    """The circulant of a reduced kernel (out, in·phases, *taps) on the places of an embedding, in one precision."""

    def __init__(self, reduced: Tensor, embedding: Embedding, dtype: torch.dtype, work: Work) -> None:
        self._grid, self._work, self._dtype = embedding.grid, work, dtype
        self._sizes, self._axes = self._grid.sizes, embedding.axes
        kernel = reduced.to(dtype)
        places = [range(taps) for taps in kernel.shape[2:]]
        twiddles = self._grid.twiddles(self._grid.indices(kernel.device), self._grid.tables(places, kernel))
        self.small_is_output = kernel.shape[0] <= kernel.shape[1]
        # The layer reads place o + a where a convolution would read o - a: its symbol is the conjugate of E.
        forward = symbols(taps_first(kernel, len(self._axes)), twiddles)
        self._maps = forward.mT if self.small_is_output else forward.conj().resolve_conj()
        self._phases = [min(axis.stride, axis.taps) for axis in self._axes]
        masks = self._input_mask(embedding, kernel.shape[1]), self._output_mask(embedding)
        self._small, self._large = masks[::-1] if self.small_is_output else masks
        self._transforms = [_transforms(size, dtype) for size in self._sizes[:-1]]
        self._transforms.append(_real_transforms(self._sizes[-1], dtype))
        self._inverses: Tensor | None = None

    @staticmethod
    def bytes_for(reduced: Tensor, embedding: Embedding, dtype: torch.dtype) -> int:
        """What the maps take, twice while they are made, the preconditioner, and the Fourier transforms."""
        outputs, inputs = reduced.shape[:2]
        transforms = 48 * sum(size**2 for size in embedding.grid.sizes)
        return 4 * dtype.itemsize * len(embedding.grid) * (outputs * inputs + min(outputs, inputs) ** 2) + transforms

    def _input_mask(self, embedding: Embedding, channels: int) -> Tensor:
        """1 inside, (*places, channels and phases, 1)."""
        mask = torch.zeros([axis.size for axis in embedding.axes], dtype=self._dtype)
        mask[embedding.inputs] = 1
        phased = self.to_phases(mask[..., None, None])
        count = len(self._sizes)
        return phased.repeat(*(1,) * count, channels // phased.shape[count], 1)

    def _output_mask(self, embedding: Embedding) -> Tensor:
        mask = torch.zeros(*self._sizes, 1, 1, dtype=self._dtype)
        mask[embedding.outputs] = 1
        return mask

    def to_phases(self, x: Tensor) -> Tensor:
        """Inputs on the fine circle (*places, channels, count) as channels and phases on the coarse one.

        Phases that no tap reads are left out.
        """
        channels = len(self._sizes)
        for axis, (size, phases) in enumerate(zip(self._sizes, self._phases, strict=True)):
            split = x.unflatten(axis, (size, -1)).narrow(axis + 1, 0, phases)
            x = split.movedim(axis + 1, channels + 1).flatten(channels, channels + 1)
        return x

    def from_phases(self, x: Tensor) -> Tensor:
        """The inverse, with zeros for phases that no tap reads."""
        channels = len(self._sizes)
        for axis in reversed(range(channels)):
            split = x.unflatten(channels, (-1, self._phases[axis])).movedim(channels + 1, axis + 1)
            missing = self._axes[axis].stride - self._phases[axis]
            unread = split.new_zeros(*split.shape[: axis + 1], missing, *split.shape[axis + 2 :])
            x = torch.cat([split, unread], axis + 1).flatten(axis, axis + 1)
        return x

    def _spectrum(self, x: Tensor) -> Tensor:
        """(frequencies of the half grid, channels, count)."""
        shape = x.shape[-2:]
        forward = self._transforms[-1][0]
        parts = forward @ x.flatten(-2)
        half = len(forward) // 2
        values = torch.complex(parts[..., :half, :], parts[..., half:, :])
        for axis in range(len(self._sizes) - 1):
            values = _along(self._transforms[axis][0], values, axis)
        return values.reshape(-1, *shape)

    def _space(self, spectrum: Tensor) -> Tensor:
        values = spectrum.reshape(*self._grid.shape, -1)
        for axis in range(len(self._sizes) - 1):
            values = _along(self._transforms[axis][1], values, axis)
        parts = torch.cat([values.real, values.imag], -2)
        space: Tensor = (self._transforms[-1][1] @ parts).unflatten(-1, spectrum.shape[1:])
        return space

    def _apply(self, x: Tensor) -> Tensor:
        return self._space(self._maps @ self._spectrum(x))

    def _adjoint(self, y: Tensor) -> Tensor:
        # A product with a transposed matrix needs no copy of it, one with its adjoint does.
        return self._space((self._maps.mT @ self._spectrum(y).conj().resolve_conj()).conj())

    def gram_inside(self, x: Tensor) -> Tensor:
        """B*B of the layer, that is of the inside, on vectors of its small side."""
        return self._small * self._adjoint(self._large * self._apply(x))

    def waves(self, index: int, vectors: Tensor) -> Tensor:
        """Real plane waves at one frequency, and at its opposite, on the small side, of length 1.

        Args:
            index: into the half grid.
            vectors: eigenvectors of G(ω) as columns, real where the frequency is its own opposite.
        """
        wave = torch.ones((), dtype=torch.complex128)
        for size, turn in zip(self._sizes, self._turns(index), strict=True):
            angles = (torch.arange(size) * turn % size).double() * (2 * math.pi / size)
            wave = wave[..., None] * torch.exp(1j * angles)
        # On the side of the outputs B*B is the conjugate of G.
        vectors = vectors.conj() if self.small_is_output else vectors
        waves = wave[..., None, None] * vectors
        parts = waves.real if self.is_alone(index) else torch.cat([waves.real, waves.imag], -1)
        unit: Tensor = parts / parts.flatten(0, -2).norm(dim=0)
        return unit.to(self._dtype)

    def _turns(self, index: int) -> list[int]:
        """Which multiple of 2π/m a frequency of the half grid is on each axis."""
        result = []
        for size in reversed(self._grid.shape):
            index, turn = divmod(index, size)
            result.append(turn)
        return result[::-1]

    def opposite(self, index: int) -> int | None:
        """The place of -ω in the half grid, if it is there."""
        result = 0
        for turn, size, held in zip(self._turns(index), self._sizes, self._grid.shape, strict=True):
            if -turn % size >= held:
                return None
            result = result * held + -turn % size
        return result

    def is_alone(self, index: int) -> bool:
        """Whether a frequency is its own opposite."""
        return self.opposite(index) == index

    def precondition(self, level: float, found: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Keep the inverses of |s²I - B*B| at each frequency, from the eigenpairs above s²."""
        order = self._maps.shape[2]
        self._inverses = torch.empty(len(self._maps), order, order, dtype=COMPLEX[self._dtype])
        for start in range(0, len(self._maps), PORTION):
            maps = self._maps[start : start + PORTION]
            matrices = -(maps.mT @ maps.conj().resolve_conj()).conj().resolve_conj()
            for index in range(start, start + len(maps)):
                if index in found:
                    values, vectors = found[index]
                    scaled = (vectors * (2 * (values - level**2)).clamp_min(0).sqrt()).to(matrices.dtype)
                    scaled = scaled.conj() if self.small_is_output else scaled
                    matrices[index - start] += scaled @ scaled.mH
            # A little more than s², so that what is close to it does not spoil the inverse.
            matrices.diagonal(dim1=-2, dim2=-1).add_(level**2 * (1 + 1e-3))
            factors, failed = torch.linalg.cholesky_ex(matrices)
            factors[failed != 0] = level * torch.eye(order, dtype=factors.dtype)
            self._inverses[start : start + len(maps)] = torch.cholesky_inverse(factors)

    def _preconditioned(self, x: Tensor) -> Tensor:
        if self._inverses is None:
            return x
        return self._small * self._space(self._inverses @ self._spectrum(x))

    def others(self, count: int) -> Tensor:
        """Random vectors inside, on the small side."""
        shape = (*self._sizes, self._maps.shape[2], count)
        return self._small * torch.randn(shape, dtype=self._dtype, generator=torch.Generator().manual_seed(0))

    def solve(self, waves: Tensor, sizes: Tensor, level: float, enough: float) -> tuple[Tensor, Tensor]:
        """The vectors z = w + x with Az = 0 inside, of both sides, for singular vectors w of the circulant.

        With a on the small side, b on the large one: b = Ba/s inside, and a solves (s²I - B*B)a = right side there. By
        block conjugate gradients: the residuals of all vectors, and of a few others, span the directions together.

        Args:
            waves: singular vectors of the small side, of length 1.
            sizes: their singular values.
            level: s.
            enough: stop when R*R <= η·diag(2(σ - s)) with η below this, R the rows of AZ inside.

        Raises:
            TooLowError: if a vector inside shows that the norm is above the level.
        """
        outer = waves * (1 - self._small)
        outer_images = self._apply(waves) / sizes.to(waves.dtype) * (1 - self._large)
        right = self._small * self._adjoint(self._large * self._apply(outer) + level * outer_images)
        x = waves * self._small
        residual = right - (level**2 * x - self.gram_inside(x))
        count = len(sizes)
        others = self.others(max(0, BLOCK - count))
        residual, x = torch.cat([residual, others], -1), torch.cat([x, torch.zeros_like(others)], -1)
        shape = x.shape
        weights = (2 * (sizes - level)).rsqrt() / level
        past: list[tuple[Tensor, Tensor]] = []
        least, since = math.inf, 0
        for step in range(MOST_STEPS):
            self._work.tick(NAME, step / MOST_STEPS)
            rows = residual.flatten(0, -2)[:, :count].double() * weights
            eta = float(torch.linalg.eigvalsh(rows.T @ rows)[-1])
            least, since = (eta, 0) if eta < least / 2 else (least, since + 1)
            if eta <= enough or since > PATIENCE or math.isnan(eta):
                break
            new = self._preconditioned(residual).flatten(0, -2)
            for _ in range(2):  # conjugate to those before; once leaves too much of them
                for directions, images in past:
                    new = new - directions @ (images.T @ new)
            image = level**2 * new - self.gram_inside(new.reshape(*shape[:-1], -1)).flatten(0, -2)
            new, image = _orthonormal(new, image)
            part = new.T @ residual.flatten(0, -2)
            x = x + (new @ part).reshape(shape)
            residual = residual - (image @ part).reshape(shape)
            past.append((new, image))
            while len(past) > 1 and sum(block.shape[1] for block, _ in past) > REMEMBERED:
                past.pop(0)
        small = x[..., :count] + outer
        return small, self._large * self._apply(small) / level + outer_images


class TooLowError(Exception):
    """A vector inside was found that shows that the norm is above the level."""


def _orthonormal(vectors: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Combinations of columns that are orthonormal in the energy v*Av, of vectors and of their images Av.

    First in the usual sense, so that what is left out there depends on other columns, and not on its small energy.
    """
    lengths = vectors.norm(dim=0).clamp_min(1e-30)
    vectors, images = vectors / lengths, images / lengths
    gram, energy = (vectors.T @ vectors).double(), (vectors.T @ images).double()
    values, basis = torch.linalg.eigh(gram)
    kept = values > DEPENDENT[vectors.dtype] * values[-1]
    first = basis[:, kept] / values[kept].sqrt()
    values, basis = torch.linalg.eigh(first.T @ ((energy + energy.T) / 2) @ first)
    if float(values[0]) < -DEPENDENT[vectors.dtype] * float(values[-1]):
        raise TooLowError
    kept = values > DEPENDENT[vectors.dtype] / 10 * values[-1]
    combination = (first @ (basis[:, kept] / values[kept].sqrt())).to(vectors.dtype)
    return vectors @ combination, images @ combination


def _angles(frequencies: int, size: int) -> Tensor:
    return (torch.outer(torch.arange(frequencies), torch.arange(size)) % size).double() * (2 * math.pi / size)


def _transforms(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The matrices of a Fourier transform and of its inverse."""
    forward = torch.exp(-1j * _angles(size, size)).to(COMPLEX[dtype])
    return forward, forward.mH.resolve_conj() / size


def _real_transforms(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of real vectors, with half of the frequencies: real parts above imaginary ones."""
    held = size // 2 + 1
    angles = _angles(held, size)
    forward = torch.cat([angles.cos(), -angles.sin()])
    times = torch.tensor([1.0 if 2 * index % size == 0 else 2.0 for index in range(held)]).repeat(2)
    return forward.to(dtype), (forward.T * times / size).to(dtype)


def _along(matrix: Tensor, values: Tensor, axis: int) -> Tensor:
    """A product along one axis of complex values."""
    moved = values.movedim(axis, 0)
    return (matrix @ moved.flatten(1)).reshape(-1, *moved.shape[1:]).movedim(0, axis)
