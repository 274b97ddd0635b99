r"""The only file that knows machine epsilon: directed rounding, error terms, and what is assumed of the machine.

Notation: u is the unit roundoff (2⁻⁵³ in float64, 2⁻²⁴ in float32), γ_n = nu/(1-nu). Every term holds for any order of
summation, with or without fused multiply-add, so it does not depend on threads, blocking or vector width. Underflow
adds at most the smallest normal number per operation, even if subnormal results are flushed to zero.

The derivations are in ``docs/what-is-certified.md``.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction

import torch
from torch import Tensor

from gramcert.arguments import in_memory_order, memory_order
from gramcert.precision import full_float32_products

_UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
_SMALLEST_NORMAL = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022}

# Roundings of one entry of a Cholesky factor beside its sum: reciprocal of the pivot, product, root, storing.
_PIVOT_ROUNDINGS = 8

# |fl(e^(iφ)) - e^(iφ)| for a product of three factors, one for each axis. The angle of a factor is at most 2π and
# rounded three times (quotient, 2π, product), which is at most 3u·2π < 19u; sine and cosine are within 4 units of their
# last place, 8u each, together at most 12u. A product of two is rounded by √2·γ_2 < 3u. So 3·31u + 2·3u, and far less
# than 1u of higher order: below 100u.
TWIDDLE_ERROR = 128 * _UNIT[torch.float64]

_LARGEST = math.nextafter(math.inf, 0.0)
_INFINITY = torch.tensor(math.inf, dtype=torch.float64, device="cpu")

# Entries of large tensors that are worked on at a time.
_PIECE = 2**19

ASSUMPTIONS = (
    "IEEE 754 arithmetic, rounding to nearest, subnormal numbers kept (checked in every call)",
    "float32 products keep their 24 bits: no TF32, no bfloat16 (set, and checked in every call)",
    "matrix products, triangular solves and Cholesky factors of BLAS and LAPACK are the conventional ones, in any "
    "order of summation: no Strassen, no 3M",
    "sine and cosine of float64 angles are within 4 units in the last place",
)


def up(value: float) -> float:
    """The next float above: an upper bound of the real number that was rounded to ``value``.

    Of NaN it is infinity: what overflow made of a bound is above everything, and no comparison can pass over it.
    """
    return math.inf if math.isnan(value) else math.nextafter(value, math.inf)


def down(value: float) -> float:
    """The next float below, but a non-negative quantity stays non-negative; of NaN minus infinity."""
    if math.isnan(value):
        return -math.inf
    return max(0.0, math.nextafter(value, -math.inf)) if value >= 0 else math.nextafter(value, -math.inf)


def largest_upper(lower: float, tol: float) -> float:
    """About the largest upper bound with (upper - lower)/upper <= tol, not above it and not below the lower bound."""
    return max(lower, down(down(lower / up(1 - tol))))


def least_lower(upper: float, tol: float) -> float:
    """About the least lower bound with (upper - lower)/upper <= tol, not below it and not above the upper bound."""
    return min(upper, up(up(upper * up(1 - tol))))


def root_up(value: float) -> float:
    """Upper bound of the square root."""
    return up(math.sqrt(value))


def root_down(value: float) -> float:
    """Lower bound of the square root; 0 for negative numbers."""
    return down(math.sqrt(max(0.0, value)))


def sum_up(parts: Iterable[float]) -> float:
    """Upper bound of a sum of numbers that are not negative, exact where nothing is rounded."""
    total = 0.0
    for part in parts:
        new = total + part
        # These differences are the two parts exactly if and only if the sum was not rounded.
        total = new if new - total == part and new - part == total else up(new)
    return total


def product_up(first: float, second: float) -> float:
    """Upper bound of a product of numbers that are not negative, exact where a factor is 1."""
    if first == 1 or second == 1:
        return second if first == 1 else first
    if first == 0 or second == 0:  # also where the other has overflowed to infinity
        return 0.0
    return up(first * second)


def product_down(first: float, second: float) -> float:
    """Lower bound of a product of numbers that are not negative, exact where a factor is 1."""
    if first == 1 or second == 1:
        return second if first == 1 else first
    return down(first * second)


def reciprocal_up(value: float) -> float:
    """Upper bound of 1/value for a number that is not negative; 1 for 1."""
    if value == 1:
        return 1.0
    return up(1 / value) if value > 0 else math.inf


def length_up(parts: Sequence[float]) -> float:
    """√Σp² of numbers that are not negative, as a float that is not below it."""
    parts = [part for part in parts if part]
    if len(parts) <= 1:
        return parts[0] if parts else 0.0
    if not all(map(math.isfinite, parts)):
        return math.inf
    square = sum(Fraction(part) ** 2 for part in parts)
    if square > Fraction(_LARGEST) ** 2:
        return math.inf
    # The scale keeps the estimate away from overflow and underflow; then the least float that is not below the root.
    largest = max(parts)
    root = largest * math.sqrt(square / Fraction(largest) ** 2)
    while Fraction(root) ** 2 < square:
        root = math.nextafter(root, math.inf)
    while Fraction(below := math.nextafter(root, 0.0)) ** 2 >= square:
        root = below
    return root


def scaled_up(value: float, exponent: int) -> float:
    """Upper bound of value·2^exponent: exact, but for overflow and underflow."""
    try:
        scaled = math.ldexp(value, exponent)
    except OverflowError:
        return math.inf
    return scaled if math.ldexp(scaled, -exponent) == value else up(scaled)


def scaled_down(value: float, exponent: int) -> float:
    """Lower bound of value·2^exponent for value >= 0."""
    try:
        scaled = math.ldexp(value, exponent)
    except OverflowError:
        return math.nextafter(math.inf, 0.0)
    return scaled if math.ldexp(scaled, -exponent) == value else down(scaled)


def gamma(terms: int, dtype: torch.dtype = torch.float64) -> float:
    """γ_n: bounds the relative error of n roundings in a row, and of sums of n products in any order."""
    small = terms * _UNIT[dtype]  # exact: a power of two times an integer
    return up(small / (1 - small)) if small < 1 else math.inf


def exact_integers(dtype: torch.dtype) -> int:
    """All integers up to this one are numbers of the type."""
    return int(2 / torch.finfo(dtype).eps)


def underflow(operations: int, dtype: torch.dtype = torch.float64) -> float:
    """What that many operations can lose to underflow, absolutely."""
    return operations * _SMALLEST_NORMAL[dtype]


def complex_gamma(terms: int, dtype: torch.dtype = torch.float64) -> float:
    """|fl(Σab) - Σab| <= √2·γ_2n·Σ|a||b| for complex sums: each part is a real sum of 2n products."""
    return up(1.4142135623730951 * gamma(2 * terms, dtype))


def total_up(values: Tensor) -> float:
    """Upper bound of the largest sum over the last axis of non-negative float64 numbers."""
    terms = values.shape[-1]
    return up(up(float(values.sum(-1).max()) * (1 + 2 * gamma(terms))) + underflow(terms))


def absolute_sums(kernel: Tensor, exponent: int = 0) -> tuple[float, float]:
    """Upper bounds of Σ|K| over what one output channel reads, and over what reads one input channel.

    Of weights times 2^exponent, in pieces that take little memory, and in any type whose numbers float64 has.
    """
    weights = kernel.detach().reshape(*kernel.shape[:2], -1)
    rows, columns = (torch.zeros(count, dtype=torch.float64) for count in weights.shape[:2])
    lost, room = lost_by_scaling(weights, exponent), _room_for_parts(weights)
    for first, piece in _pieces(weights, 0, weights[0].numel()):
        for second, part in _pieces(piece, 1, weights.shape[2]):
            for _, few in _pieces(part, 2, 1):
                scaled = lift_by(few, exponent, room)
                rows[first : first + len(few)] += torch.linalg.vector_norm(scaled, 1, dim=(1, 2))
                columns[second : second + few.shape[1]] += torch.linalg.vector_norm(scaled, 1, dim=(0, 2))
    totals = []
    for sums, terms in ((rows, weights[0].numel()), (columns, weights[:, 0].numel())):
        # Each is a sum of so many terms in some order, of which each may have lost something.
        largest = up(float(sums.max()) * (1 + 2 * gamma(terms)))
        totals.append(up(largest + up(underflow(terms) + up(terms * lost))))
    return totals[0], totals[1]


def _pieces(values: Tensor, dim: int, each: int) -> Iterator[tuple[int, Tensor]]:
    """Consecutive parts along one axis, of a moderate number of entries where one index has ``each`` of them."""
    step = max(1, _PIECE // each)
    for start in range(0, values.shape[dim], step):
        yield start, values.narrow(dim, start, min(step, values.shape[dim] - start))


def square_norm(vector: Tensor) -> tuple[float, float]:
    """Lower and upper bound of Σ|x|², x real or complex, in float64 and two stages, so that the term stays small."""
    real = (torch.view_as_real(vector).flatten() if vector.is_complex() else vector.flatten()).double()
    side = max(1, math.isqrt(real.numel()))
    whole = real.numel() // side * side
    partial = torch.cat([real[:whole].reshape(-1, side).square().sum(-1), real[whole:].square().sum()[None]])
    total = float(partial.sum())
    if not math.isfinite(total):  # overflow, or entries that are no numbers
        return 0.0, math.inf
    error = gamma(side + len(partial) + 1)
    lost = underflow(2 * real.numel())
    return down(down(total / (1 + error)) - lost), up(up(total * (1 + 2 * error)) + lost)


def row_norms_up(rows: Tensor) -> Tensor:
    """Upper bounds of the Euclidean norms of float64 rows."""
    terms = rows.shape[-1]
    squares = _sums_of_squares(rows) * (1 + 2 * gamma(terms + 2)) + underflow(2 * terms)
    return next_up(next_up(squares).sqrt())


def _sums_of_squares(rows: Tensor) -> Tensor:
    """A few rows at a time, whose squares stay in the cache, in memory that is asked for once."""
    rows = rows.detach()
    if rows.dim() != 2:
        return rows.square().sum(-1)
    few = max(1, _PIECE // max(1, rows.shape[1]))
    if len(rows) <= few:
        return rows.square().sum(-1)
    room, sums = rows.new_empty(few, rows.shape[1]), rows.new_empty(len(rows))
    for part, result in zip(rows.split(few), sums.split(few), strict=True):
        torch.sum(torch.mul(part, part, out=room[: len(part)]), -1, out=result)
    return sums


def next_up(values: Tensor) -> Tensor:
    """The next floats above; infinity for NaN, as in :func:`up`."""
    return torch.nextafter(values, _INFINITY.to(values)).nan_to_num_(math.inf, math.inf, -math.inf)


def next_down(values: Tensor) -> Tensor:
    """The next floats below; minus infinity for NaN."""
    return torch.nextafter(values, -_INFINITY.to(values)).nan_to_num_(-math.inf, math.inf, -math.inf)


def frobenius_up(weights: Tensor, exponent: int = 0) -> float:
    """Upper bound of the Euclidean norm of all weights times 2^exponent, in little memory."""
    total, room = 0.0, _room_for_parts(weights)
    for part in _small_parts(weights.detach()):
        entries = in_memory_order(lift_by(part, exponent, room)).reshape(-1)
        square = up(float(entries @ entries) * (1 + 2 * gamma(entries.numel())))
        total = up(total + up(square + underflow(2 * entries.numel())))
    return root_up(total)


def norm_down(vector: Tensor) -> float:
    """Lower bound of the Euclidean norm."""
    return root_down(square_norm(vector)[0])


def norm_up(vector: Tensor) -> float:
    """Upper bound of the Euclidean norm."""
    return root_up(square_norm(vector)[1])


def quotient_bounds(image: Tensor, error: float, vector: Tensor) -> tuple[float, float]:
    """Bounds of ‖y‖/‖x‖ where y is within ``error`` of the image in norm; 0 and infinity for a zero vector."""
    least, most = (root(part) for root, part in zip((root_down, root_up), square_norm(vector), strict=True))
    if not least > 0:
        return 0.0, math.inf
    lower = down(down(norm_down(image) - error) / most)
    return max(0.0, lower), up(up(norm_up(image) + error) / least)


def cholesky_error(
    order: int, trace: float, dtype: torch.dtype, *, is_complex: bool, terms: int | None = None
) -> float:
    """If the Cholesky factorisation of a stored Hermitian A runs to its end, λ_min(A) >= -this.

    The computed R satisfies |R*R - A| <= ρ|R*||R| with ρ of a sum of ``order`` products, so Σ_k |r_ki|² <= a_ii/(1-ρ),
    and ‖|R*||R|‖ <= ‖R‖_F² <= tr(A)/(1-ρ) (Higham, chapter 10; Rump 2006). Where each product is known to meet fewer
    roundings, ``terms`` says of how long a sum.
    """
    relative = (complex_gamma if is_complex else gamma)((terms or order) + _PIVOT_ROUNDINGS, dtype)
    if relative >= 1:
        return math.inf
    return factor_error(order, up(trace / down(1 - relative)), dtype, is_complex=is_complex, terms=terms)


def factor_error(order: int, size: float, dtype: torch.dtype, *, is_complex: bool, terms: int | None = None) -> float:
    """The same from a bound ``size`` of ‖|R*||R|‖ itself, of the R that was computed."""
    relative = (complex_gamma if is_complex else gamma)((terms or order) + _PIVOT_ROUNDINGS, dtype)
    return up(up(relative * size) + underflow(4 * order * (order + _PIVOT_ROUNDINGS), dtype))


def sums_up(values: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Upper bounds of sums of up to ``count`` products of sums of up to ``count`` numbers that are not negative."""
    relative = 4 * gamma(2 * count + 8, dtype)
    lost = underflow(4 * count * count, dtype)
    return next_up(next_up(values * (1 + relative)) + lost) if relative < 1 else torch.full_like(values, math.inf)


def banded_cholesky_error(terms: int, half_bandwidth: int, largest: float) -> float:
    """The same for a real matrix in float64 with that half-bandwidth, sums of ``terms`` and largest diagonal entry.

    (|Rᵀ||R|)_ij <= √(a_ii·a_jj)/(1-ρ) and is zero outside the band, so its row sums are at most (2b+1)·max a_ii/(1-ρ).
    """
    relative = gamma(terms + _PIVOT_ROUNDINGS)
    row = (2 * half_bandwidth + 1) * largest
    lost = underflow(8 * (half_bandwidth + 1) * (terms + _PIVOT_ROUNDINGS))
    return up(up(up(relative * row) / down(1 - relative)) + lost)


def diagonal_error(size: float, dtype: torch.dtype) -> float:
    """Rounding of (level - error) - a_ii where all are at most ``size``: two in float64, two in the type."""
    return 8 * _UNIT[dtype] * size


def lift(weights: Tensor) -> tuple[Tensor, float, int]:
    """Weights as float64 times a power of two, with largest entry in [½, 1).

    Returns the scaled weights, how much each of them may have lost to underflow, and the exponent that undoes it.
    """
    exact = weights.detach().cpu().double()
    exponent = largest_exponent(exact)
    return *scaled_tensor(exact, -exponent), exponent


def lift_by(weights: Tensor, exponent: int, room: Tensor | None = None) -> Tensor:
    """weights·2^exponent in float64 on the CPU, to be read only; what that may lose is :func:`lost_by_scaling`.

    Where something has to be written, it goes into the ``room``, if there is one: new memory takes time, and what is
    asked for and given back again and again becomes more than it was.
    """
    weights = weights.detach()
    is_exact = weights.dtype == torch.float64 and weights.device.type == "cpu"
    if is_exact and not exponent:
        return weights
    exact = weights.to("cpu", torch.float64, copy=True) if room is None else room_like(weights, room).copy_(weights)
    return _scaled(exact, exponent, overwrite=True) if exponent else exact


def room_like(values: Tensor, room: Tensor) -> Tensor:
    """The beginning of a flat tensor in the shape of others, and in their order in memory."""
    order = memory_order(values)
    ordered = room[: values.numel()].view([values.shape[axis] for axis in order])
    return ordered.permute([order.index(axis) for axis in range(values.dim())])


def largest_exponent(weights: Tensor) -> int:
    """The exponent of the largest |weight|, which is in [½, 1) times that power of two."""
    least, most = torch.aminmax(in_memory_order(weights.detach()))
    return math.frexp(max(-float(least), float(most)))[1]


def scaled_tensor(values: Tensor, exponent: int) -> tuple[Tensor, float]:
    """values·2^exponent in float64, and how much each entry may have lost to underflow, if they become smaller."""
    scaled = _scaled(values, exponent)
    kept = exponent >= 0 or torch.equal(_scaled(scaled, -exponent), values)
    return scaled, 0.0 if kept else 2.0**-1073


def lost_by_scaling(weights: Tensor, exponent: int) -> float:
    """How much each of the weights times 2^exponent may lose to underflow in float64, found in little memory.

    Numbers of shorter types are multiples of 2^-149, those of float64 of 2^-1074.
    """
    if exponent >= (0 if weights.dtype == torch.float64 else -925):
        return 0.0
    room = _room_for_parts(weights)
    for part in _small_parts(weights.detach()):
        back = _scaled(lift_by(part, exponent, room), -exponent, overwrite=True)
        if not torch.equal(back, part.cpu().double()):
            return 2.0**-1073
    return 0.0


def _scaled(values: Tensor, exponent: int, *, overwrite: bool = False) -> Tensor:
    """In two steps where the power of two itself might be none of float64's normal numbers."""
    first = exponent if 0 <= exponent < 1024 else exponent // 2
    scaled = values.mul_(2.0**first) if overwrite else values * 2.0**first
    return scaled if first == exponent else scaled.mul_(2.0 ** (exponent - first))


def _room_for_parts(values: Tensor) -> Tensor:
    return torch.empty(min(values.numel(), _PIECE), dtype=torch.float64)


def _small_parts(values: Tensor) -> Iterator[Tensor]:
    """All of a tensor, a moderate number of entries at a time."""
    if values.numel() <= _PIECE:
        yield values
    elif len(values) == 1:
        yield from _small_parts(values[0])
    else:
        for part in values.split(max(1, _PIECE // values[0].numel())):
            yield from _small_parts(part)


@contextmanager
def checked_arithmetic(call: str) -> Iterator[None]:
    """Full precision inside, without gradients, after checking what can be checked of the machine.

    The precision of float32 products is a setting of the process, put back at the end.
    """
    elsewhere = torch.get_default_device().type != "cpu"  # where new tensors would be made
    device = torch.device("cpu") if elsewhere else nullcontext()
    # Without torch.func, whose wrappers would hide values from proofs that branch on them.
    outside = torch._C._DisableFuncTorch()
    with outside, full_float32_products(call), torch.no_grad(), torch.autocast("cpu", enabled=False), device:
        _check(call)
        yield


def _check(call: str) -> None:
    # Long enough that every thread of a parallel loop has a part.
    ones = torch.ones(2**16 * torch.get_num_threads(), dtype=torch.float64)
    one = float(ones[0])  # not a constant that the interpreter would fold
    if not bool((ones * 2.0**-1074 > 0).all()) or one * 2.0**-1074 == 0.0:
        raise RuntimeError(
            f"{call}: subnormal numbers are flushed to zero on this machine, which loses weights; "
            f"torch.set_flush_denormal(False) turns that off"
        )
    nearest = bool((ones + 2.0**-53 == 1).all()) and bool((ones + 1.5 * 2.0**-53 == 1 + 2.0**-52).all())
    if not nearest or not bool((-ones - 1.5 * 2.0**-53 == -1 - 2.0**-52).all()) or one + 2.0**-53 != 1:
        raise RuntimeError(f"{call}: expected rounding to nearest in float64, found another rounding mode")
    fine = torch.full((64, 64), 1 + 2.0**-23)
    if not bool((fine @ torch.eye(64) == fine).all()):
        raise RuntimeError(f"{call}: float32 matrix products lose bits on this machine (TF32 or bfloat16)")
