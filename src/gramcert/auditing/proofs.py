r"""Proofs that a linear map has at most some norm, by other means than those that measured it.

A measurement searches; a proof is told the number, and tries one test after another:

- **balls**: small Gram matrices G in ball arithmetic, level²·I - G factorised as LDLᵀ with every pivot positive;
- **cells**: all frequencies of a convolution covered by cells; with centre c and r = Σ d_j h_j < π/2 of the
  half-widths, σ(E(c)) <= level·cos r in every cell proves sup σ(E) <= level (docs/what-is-certified.md);
- **grid**: the same without the cosine on the frequencies of a circulant that contains the layer;
- **band**: the sparse matrix of the layer, put together here from its definition, its Gram matrix, and a block banded
  Cholesky factorisation of level²·I - G with Rump's term; or a dense one;
- **circulant but for a few vectors**: where that would take minutes, for zero padding.

The last is the proof of the measurement itself, made again for the given number (:mod:`gramcert.certified.embedded`).
None of the others shares code with the search but the directed roundings and, for strided cells, the kernel's phases.
Bounds from below need no search either: a vector is given, or the norm is known in closed form.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramcert.certified.banded import band_operations
from gramcert.certified.embedded import proves_below as embedded_below
from gramcert.certified.embedding import EMBEDDED
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import PaddingMode
from gramcert.geometry.reduction import one_size_bound, reduced_kernels
from gramcert.operators.linear import LinearMap, Move, Scale
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.operators.measurement import witnessed_lower
from gramcert.rounding import (
    TWIDDLE_ERROR,
    absolute_sums,
    banded_cholesky_error,
    checked_arithmetic,
    cholesky_error,
    complex_gamma,
    diagonal_error,
    down,
    gamma,
    root_up,
    underflow,
    up,
)

# Order of a Gram matrix, and products to make it, up to which ball arithmetic is quick.
BALL_ORDER, BALL_PRODUCTS = 64, 2**21

# Bits of the balls.
BALL_BITS = 128

# Cells that may be open at a time, and entries of the symbols in one batch.
MOST_CELLS, BATCH_ENTRIES = 2**16, 2**21

# Entries of a dense Gram matrix, or of a block of one; and order of the smallest block.
MOST_NUMBERS, SMALLEST_BLOCK = 2**26, 256

# Operations of a factorisation that take minutes, and the memory of what is then done instead.
MOST_OPERATIONS, CIRCULANT_BYTES = 5e11, 2**31

# Channels from which sparse products are faster block by block.
SMALLEST_DENSE = 4

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Proof:
    """Whether a bound was proved, and by which test; or why not."""

    proved: bool
    method: str


def proves_below(linear: LinearMap, level: float) -> Proof:
    """Whether the true map behind ``linear`` has at most the norm ``level``."""
    if not level >= 0:
        return Proof(False, "a norm is not negative")
    if 0 in (*linear.source, *linear.target):
        return Proof(True, "nothing goes in, or nothing comes out")
    with checked_arithmetic("verify"):
        if isinstance(linear, Move):
            return Proof(Fraction(level) ** 2 >= _most(linear), "entries counted")
        if isinstance(linear, Scale):
            largest = _largest(linear)
            return Proof(up(largest + linear.error) <= level if linear.error else largest <= level, "largest factor")
        margin = _less(level, linear.error)
        if not margin >= 0:
            return Proof(False, "the rounding of its own numbers is above the bound")
        if isinstance(linear, AxisMatrix):
            return _matrix_below(linear.matrix.numpy(), margin)
        assert isinstance(linear, Convolve)
        return layer_below(linear.layer, linear.input_size, margin)


def proves_above(linear: LinearMap, level: float, witness: Tensor | None) -> bool:
    """Whether the true map behind ``linear`` has at least the norm ``level``: by a vector, or in closed form."""
    if witness is not None:
        return isinstance(linear, (AxisMatrix, Convolve)) and witnessed_lower(linear, witness) >= level
    if not 0 < level < math.inf:
        return level == 0
    if 0 in (*linear.source, *linear.target) or not linear.error < math.inf:
        return False
    needed = Fraction(level) + Fraction(linear.error)
    if isinstance(linear, Move):
        return needed**2 <= _most(linear)
    if isinstance(linear, Scale):
        return needed <= Fraction(_largest(linear))
    longest = _longest(linear.matrix.numpy()) if isinstance(linear, AxisMatrix) else None
    return longest is not None and needed**2 <= longest


def _most(linear: Move) -> int:
    """How often the most repeated entry occurs."""
    places, counts = np.unique(linear.index.numpy(), return_counts=True)
    return int(max(counts[places > 0], default=0))


def _largest(linear: Scale) -> float:
    return float(np.abs(linear.factors.numpy()).max())


def _longest(matrix: Array) -> Fraction | None:
    """The square of the norm where rows, or columns, share no place and so are orthogonal: that of the longest."""
    for lines in (matrix, matrix.T):
        if np.count_nonzero(lines, axis=0).max() <= 1:
            return max(sum((Fraction(float(value)) ** 2 for value in line[line != 0]), Fraction()) for line in lines)
    return None


def _less(level: float, error: float) -> float:
    """The largest float whose sum with the error is not above the level."""
    margin = math.nextafter(level - error, math.inf) if error < math.inf else -1.0
    while margin >= 0 and Fraction(margin) + Fraction(error) > Fraction(level):
        margin = math.nextafter(margin, -math.inf)
    return margin


def layer_below(layer: Convolution, input_size: tuple[int, ...] | None, level: float) -> Proof:
    """Whether a convolution at one size, or a matrix as one with a single tap, has at most the norm ``level``."""
    if not 0 <= level < math.inf:
        return Proof(False, "a norm is finite and not negative")
    if input_size is None:
        return _matrix_below(layer.kernel[:, :, 0].numpy(), level)
    linear = Convolve((1, layer.in_channels, *input_size), layer)
    small = min(math.prod(linear.source), math.prod(linear.target)) // layer.groups <= BALL_ORDER
    if not small and level > 0:
        for test in (_by_cells, _by_grids):
            found = test(linear, level)
            if found.proved:
                return found
        if linear.layer.padding_mode == "zeros" and _operations(linear) > MOST_OPERATIONS:
            return _by_circulants(linear, level)
    return _by_matrices(linear, level)


# Matrices


def _matrix_below(matrix: Array, level: float) -> Proof:
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    rows, columns = matrix.shape
    if not np.any(matrix):
        return Proof(True, "all weights are zero")
    if _crude(matrix) <= level:
        return Proof(True, "sums of absolute weights")
    longest = _longest(matrix)
    if longest is not None:
        return Proof(Fraction(level) ** 2 >= longest, "lengths of rows or columns that share no place")
    if rows <= BALL_ORDER and rows * rows * columns <= BALL_PRODUCTS and find_spec("flint") is not None:
        return Proof(_by_balls(matrix, level), "ball arithmetic")
    if rows * rows > MOST_NUMBERS:
        return Proof(False, f"a Gram matrix of order {rows} is too large to be checked")
    # Scaled, so that nothing overflows; powers of two change no digit.
    exponent = math.frexp(float(np.abs(matrix).max()))[1]
    matrix, level = np.ldexp(matrix, -exponent), math.ldexp(level, -exponent)
    weights = torch.from_numpy(np.ascontiguousarray(matrix))
    gram = weights @ weights.T
    one, infinity = absolute_sums(weights)
    rounding = up(up(gamma(columns + 2) * up(one * infinity)) + underflow(4 * columns * rows))
    return Proof(_dense_below(gram, level, rounding), "dense Cholesky factorisation")


def _dense_below(gram: Tensor, level: float, rounding: float) -> bool:
    order, square = len(gram), down(level * level)
    error = cholesky_error(order, up(up(order * up(level * level)) + rounding), torch.float64, is_complex=False)
    shift = down(square - up(up(error + rounding) + diagonal_error(2 * square, torch.float64)))
    if shift <= 0:
        return False
    shifted = -gram
    shifted.diagonal().add_(shift)
    return not int(torch.linalg.cholesky_ex(shifted)[1])


def _by_balls(matrix: Array, level: float) -> bool:
    """LDLᵀ of level²·I - AAᵀ; a ball that may contain 0 proves nothing."""
    import flint

    before, flint.ctx.prec = flint.ctx.prec, BALL_BITS
    try:
        balls = flint.arb_mat([[flint.arb(float(value)) for value in row] for row in matrix])
        gram = balls * balls.transpose()
        order = gram.nrows()
        square = flint.arb(level) ** 2
        rest = [[(square if i == j else 0) - gram[i, j] for j in range(i + 1)] for i in range(order)]
        for k in range(order):
            pivot = rest[k][k]
            if not pivot > 0:
                return False
            for i in range(k + 1, order):
                factor = rest[i][k] / pivot
                for j in range(k + 1, i + 1):
                    rest[i][j] -= factor * rest[j][k]
        return True
    finally:
        flint.ctx.prec = before


# Frequencies


def _by_cells(linear: Convolve, level: float) -> Proof:
    """Every frequency, for each group; repeated pixels take the norm of the padding map off the level."""
    for kernel, target in _reduced(linear, level):
        if not _all_cells_below(kernel, target):
            return Proof(False, "some frequency is above the bound")
    return Proof(True, "Cholesky factorisations over all frequencies")


def _by_grids(linear: Convolve, level: float) -> Proof:
    """The frequencies of a circulant that contains the layer, shifted or not: one of them is enough."""
    for grid in one_size_bound(linear.axes).grids:
        if math.prod(grid.sizes) > MOST_CELLS:
            continue
        numerators = 2 * _grid(grid.sizes) + np.array([round(2 * shift) for shift in grid.shifts])
        if all(
            (crude := _crude(kernel)) <= target
            or not _failing(kernel, numerators, list(grid.sizes), target, crude).any()
            for kernel, target in _reduced(linear, level)
        ):
            return Proof(True, "Cholesky factorisations on a circulant that contains the layer")
    return Proof(False, "some frequency of each circulant is above the bound")


def _by_circulants(linear: Convolve, level: float) -> Proof:
    """Such a circulant but for a few vectors, where the matrix of the layer is too large.

    This is the proof of the measurement, of a number that is told; for layers of this size there is no other.
    """
    work = Work(CIRCULANT_BYTES, None, call="verify")
    try:
        proved = embedded_below(linear.layer, linear.axes, level, work)
    except OutOfBudgetError as error:
        return Proof(False, str(error))
    return Proof(proved, EMBEDDED)


def _operations(linear: Convolve) -> float:
    """About what the factorisation of the layer's matrix would take."""
    layer = linear.layer
    kernel = layer.kernel.reshape(layer.groups, -1, *layer.kernel.shape[1:])[0]
    return layer.groups * band_operations(kernel, linear.axes)


def _reduced(linear: Convolve, level: float) -> Iterator[tuple[Array, float]]:
    """The stride-1 kernel of each group and the level for it, scaled by a power of two; σ is that of the transpose."""
    layer = linear.layer
    kernels = layer.kernel.reshape(layer.groups, -1, *layer.kernel.shape[1:])
    square = one_size_bound(linear.axes).square
    level = level if square == 1 else down(level / root_up(square))
    for kernel in reduced_kernels(kernels, layer.stride, layer.dilation).numpy():
        if not np.any(kernel):
            continue
        exponent = math.frexp(float(np.abs(kernel).max()))[1]
        kernel = np.ldexp(kernel, -exponent)
        yield kernel if kernel.shape[0] <= kernel.shape[1] else kernel.swapaxes(0, 1), math.ldexp(level, -exponent)


def _all_cells_below(kernel: Array, level: float) -> bool:
    sizes = kernel.shape[2:]
    axes = [axis for axis, taps in enumerate(sizes) if taps > 1]
    kernel = kernel.reshape(*kernel.shape[:2], *(sizes[axis] for axis in axes))
    degrees = [(taps - 1) / 2 for taps in kernel.shape[2:]]
    crude = _crude(kernel)
    if crude <= level:
        return True
    # Cells are numbered on a dyadic grid; the first axis needs half of the torus, as the kernel is real.
    counts = [max(4, 2 ** math.ceil(math.log2(4 * taps))) for taps in kernel.shape[2:]]
    cells = _grid([n if axis else n // 2 for axis, n in enumerate(counts)])
    while len(cells):
        radius = sum(up(up(d * math.pi) / n) for d, n in zip(degrees, counts, strict=True))
        cosine = math.nextafter(math.cos(up(radius)), 0.0) - 2.0**-50 if radius < 1.5 else 0.0
        if cosine > 0:
            cells = cells[_failing(kernel, 2 * cells + 1, counts, down(level * cosine), crude)]
        if not len(cells):
            return True
        if (
            _highest(kernel, 2 * cells + 1, counts) > level
            or len(cells) * 2 ** len(counts) > MOST_CELLS
            or not len(counts)
        ):
            return False
        cells = (2 * cells[:, None, :] + _grid([2] * len(counts))).reshape(-1, len(counts))
        counts = [2 * n for n in counts]
    return True


def _grid(sizes: Sequence[int]) -> Array:
    """All combinations of indices, one per row; without axes there is one of them."""
    return np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)


def _symbols(kernel: Array, numerators: Array, counts: list[int]) -> Tensor:
    """E at the frequencies numerator·π/count, by the sum over the taps."""
    taps = _grid(kernel.shape[2:])
    flat = kernel.reshape(*kernel.shape[:2], -1)
    phase = np.ones((len(numerators), len(taps)), dtype=np.complex128)
    for axis, count in enumerate(counts):
        steps = (numerators[:, axis, None] * taps[:, axis]) % (2 * count)  # exact, so that angles stay small
        phase = phase * np.exp(-1j * (steps * (math.pi / count)))
    product = torch.from_numpy(phase) @ torch.from_numpy(flat.reshape(-1, flat.shape[2]).T).to(torch.complex128)
    return product.reshape(len(numerators), *kernel.shape[:2])


def _failing(kernel: Array, numerators: Array, counts: list[int], level: float, crude: float) -> Array:
    """For which frequencies σ(E) <= level was not proved."""
    outputs, inputs = kernel.shape[:2]
    taps = math.prod(kernel.shape[2:])
    # Each twiddle is a product of one per axis; then a sum over the taps.
    relative = up(up((len(counts) + 1) * 2 * TWIDDLE_ERROR) + complex_gamma(taps + 2 * len(counts) + 4))
    margin = down(level - up(up(relative * crude) + underflow(8 * taps * outputs * inputs)))
    everything = np.ones(len(numerators), bool)
    if margin <= 0:
        return everything
    computed = up(crude * (1 + 2 * relative))
    rounding = up(up(complex_gamma(inputs + 2) * up(computed * computed)) + underflow(16 * inputs * outputs))
    square = down(margin * margin)
    trace = up(up(outputs * up(margin * margin)) + rounding)
    error = cholesky_error(outputs, trace, torch.float64, is_complex=True)
    shift = down(square - up(up(error + rounding) + diagonal_error(2 * square, torch.float64)))
    if shift <= 0:
        return everything
    result = []
    batch = max(1, BATCH_ENTRIES // (outputs * inputs))
    for start in range(0, len(numerators), batch):
        symbols = _symbols(kernel, numerators[start : start + batch], counts)
        shifted = -(symbols @ symbols.mH)
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
        result.append((torch.linalg.cholesky_ex(shifted)[1] != 0).numpy())
    return np.concatenate(result)


def _highest(kernel: Array, numerators: Array, counts: list[int]) -> float:
    """An estimate of the largest σ(E) at some of the frequencies: above the level there is nothing to prove."""
    symbols = _symbols(kernel, numerators[:: max(1, len(numerators) // 64)], counts)
    return float(torch.linalg.matrix_norm(symbols, 2).max()) * (1 - 1e-12)


def _crude(kernel: Array) -> float:
    rows, columns = absolute_sums(torch.from_numpy(np.ascontiguousarray(kernel)))
    return root_up(up(rows * columns))


# The matrix of the layer


def _by_matrices(linear: Convolve, level: float) -> Proof:
    layer, method = linear.layer, "no output depends on the input"
    kernels = layer.kernel.reshape(layer.groups, -1, *layer.kernel.shape[1:])
    for kernel in kernels.numpy():
        matrix = _sparse(kernel, linear)
        if matrix is None or not np.any(matrix.data):
            continue
        found = _sparse_below(matrix, level, kernel.shape[:2])
        if not found.proved:
            return found
        method = found.method
    return Proof(True, method)


def _sparse(kernel: Array, linear: Convolve) -> Any:
    """The matrix of one group, places first and channels last; of a transposed layer that of its adjoint."""
    from scipy import sparse  # which takes long to import

    layer = linear.layer
    inner, outer = linear.input_size, linear.target[-layer.axes :]
    inputs, outputs = (outer, inner) if layer.transposed else (inner, outer)
    steps = [
        [_selection(n, m, s, d * tap - before, layer.padding_mode) for tap in range(k)]
        for n, m, s, d, (before, _), k in zip(
            inputs, outputs, layer.stride, layer.dilation, layer.padding, layer.kernel_size, strict=True
        )
    ]
    total: Any = None
    flat = kernel.reshape(*kernel.shape[:2], -1)
    for number, tap in enumerate(itertools.product(*map(range, layer.kernel_size))):
        weights = flat[:, :, number]
        if not np.any(weights):
            continue
        places: Any = sparse.eye_array(1)
        for axis, index in enumerate(tap):
            places = sparse.kron(places, steps[axis][index])
        part = sparse.kron(places, weights, format="csr")
        total = part if total is None else total + part
    return total


def _selection(size: int, outputs: int, stride: int, offset: int, mode: PaddingMode) -> Any:
    """Which place stride·o + offset each output reads, the axis padded."""
    from scipy import sparse

    rows = np.arange(outputs)
    places = stride * rows + offset
    if mode == "circular":
        places = places % size
    elif mode == "replicate":
        places = np.clip(places, 0, size - 1)
    elif mode == "reflect":
        places = np.abs(places)
        places = np.where(places >= size, 2 * (size - 1) - places, places)
    inside = (places >= 0) & (places < size)
    ones = np.ones(int(inside.sum()))
    return sparse.csr_array((ones, (rows[inside], places[inside])), shape=(outputs, size))


def _sparse_below(matrix: Any, level: float, block: tuple[int, ...]) -> Proof:
    """A sparse matrix of dense blocks of that shape."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix, block = matrix.T, block[::-1]
    matrix = matrix.tocsr(copy=True)
    exponent = math.frexp(float(abs(matrix).max()))[1]
    matrix.data, level = np.ldexp(matrix.data, -exponent), math.ldexp(level, -exponent)
    rows, columns = matrix.shape
    if rows <= BALL_ORDER and rows * rows * columns <= BALL_PRODUCTS and find_spec("flint") is not None:
        return Proof(_by_balls(matrix.toarray(), level), "ball arithmetic")
    terms = int(np.diff(matrix.indptr).max())
    sizes = abs(matrix)
    # Entries where pixels repeat are themselves sums of a few weights.
    one, infinity = (up(float(sizes.sum(axis=axis).max()) * (1 + 2 * gamma(rows + columns))) for axis in (0, 1))
    if root_up(up(one * infinity)) <= level:
        return Proof(True, "sums of absolute weights")
    rounding = up(up(gamma(terms + 16) * up(one * infinity)) + underflow(16 * terms * rows))
    blocks = matrix.tobsr(block) if min(block) >= SMALLEST_DENSE else matrix
    gram = (blocks @ blocks.T).tocsr()
    offsets = gram.tocoo()
    width = int((offsets.row - offsets.col).max())
    if rows <= 2 * width or rows <= 1024:
        if rows * rows > MOST_NUMBERS:
            return Proof(False, f"a Gram matrix of order {rows} is too large to be checked")
        return Proof(_dense_below(torch.from_numpy(gram.toarray()), level, rounding), "dense Cholesky factorisation")
    if width**2 > MOST_NUMBERS:
        return Proof(False, f"a band of half-width {width} is too large to be checked")
    return Proof(_band_below(gram, width, level, rounding), "banded Cholesky factorisation")


def _band_below(gram: Any, width: int, level: float, rounding: float) -> bool:
    """Block by block: with blocks no smaller than the half-bandwidth, each is coupled to the next one only."""
    square, block, rows = down(level * level), max(width, SMALLEST_BLOCK), gram.shape[0]
    largest = up(square + diagonal_error(square, torch.float64))
    error = up(banded_cholesky_error(2 * block, width, largest) + rounding)
    shift = down(square - up(error + diagonal_error(2 * square, torch.float64)))
    if shift <= 0:
        return False
    solved: Tensor | None = None
    for start in range(0, rows, block):
        here, after = slice(start, start + block), slice(start + block, start + 2 * block)
        matrix = -torch.from_numpy(gram[here, here].toarray())
        matrix.diagonal().add_(shift)
        if solved is not None:
            matrix.addmm_(solved.T, solved, alpha=-1)
        factor, info = torch.linalg.cholesky_ex(matrix)
        if int(info):
            return False
        coupling = -torch.from_numpy(gram[here, after].toarray())
        solved = torch.linalg.solve_triangular(factor, coupling, upper=False)
    return True
