r"""Gram iteration (Algorithm 1, Theorem 3): upper bounds of the spectral norm by repeated squaring.

With G = WW* (or W*W, whichever is smaller) the iterates G_1 = G, G_{s+1} = G_s² have λ1(G_s) = σ(W)^(2^s), so any
reading of G_t that is never below λ1 gives an upper bound after its 2^-t-th power.

Readings of a Hermitian positive semidefinite G of order r:

* ``fro``: the Frobenius norm.
* ``inf``, ``one``: the largest absolute row or column sum; G is Hermitian, so the two are the same number.
* ``trace``: Wolkowicz-Styan, m + s·√(r-1) with m = tr(G)/r and s² = ‖G - mI‖²_F / r; never above ``fro`` and exact for
  orthogonal matrices.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gramcert.arguments import COMPLEX_TYPES, REAL_TYPES, checked_iterations, require_dense, require_finite, widened
from gramcert.bounds.autograd import full_precision, run
from gramcert.bounds.powers import Powers, divided, positive, real_view, scale_by

Norm = Literal["fro", "inf", "one", "trace"]
ROW_SUMS = ("inf", "one")


def gram_norm(matrix: Tensor, iterations: int = 6, *, norm: Norm = "fro") -> Tensor:
    r"""Upper bound of the spectral norm of each matrix in a batch, by Gram iteration.

    A bound in exact arithmetic: rounding is not included. Differentiable; at repeated maxima the gradient is one valid
    subgradient, at the zero matrix it is 0.

    Args:
        matrix: real or complex, shape (..., p, q); half precision is taken exactly, in float32.
        iterations: number of Gram products t. For ``fro`` 0 gives the Frobenius norm of the matrix itself; the other
            readings need at least one product to be a bound (the ∞-norm of [[1, 0], [1, 0]] is 1, its σ is √2).
        norm: how the last iterate is read: ``"fro"``, ``"inf"``, ``"one"`` or ``"trace"``.

    Returns:
        Real tensor of shape (...).

    Example:
        >>> import torch, gramcert
        >>> matrix = torch.tensor([[3.0, 0.0], [4.0, 5.0]], dtype=torch.float64)
        >>> [round(float(gramcert.gram_norm(matrix, t)), 6) for t in (0, 1, 2, 6)]
        [7.071068, 6.728813, 6.708332, 6.708204]
        >>> float(gramcert.gram_norm(torch.eye(64), 1)), float(gramcert.gram_norm(torch.eye(64), 1, norm="trace"))
        (2.8284270763397217, 1.0)

    References:
        Delattre et al., Efficient Bound of Lipschitz Constant for Convolutional Layers by Gram Iteration, ICML 2023;
        Wolkowicz and Styan, Bounds for eigenvalues using traces, 1980.
    """
    if not isinstance(matrix, Tensor):
        raise TypeError(f"gram_norm(matrix): expected a torch.Tensor, got {type(matrix).__name__}")
    matrix = widened(matrix)
    if matrix.dtype not in REAL_TYPES + COMPLEX_TYPES:
        raise TypeError(f"gram_norm(matrix): expected a floating-point or complex matrix, got {matrix.dtype}")
    require_dense("gram_norm", "matrix", matrix)
    if matrix.dim() < 2 or 0 in matrix.shape[-2:]:
        raise ValueError(
            f"gram_norm(matrix): expected shape (..., p, q) with p, q >= 1, got shape {tuple(matrix.shape)}"
        )
    if norm not in get_args(Norm):
        raise ValueError(f"gram_norm(norm={norm!r}): expected one of {', '.join(get_args(Norm))}")
    iterations = checked_iterations("gram_norm", iterations)
    if norm != "fro":
        reason = f" for norm={norm!r}, which bounds the spectral norm only after a Gram product"
        checked_iterations("gram_norm", iterations, at_least=1, reason=reason)
    return run(_GramNorm, matrix, iterations, norm)[0]


class _GramNorm(torch.autograd.Function):
    """Value of Gram iteration with its explicit backward.

    ``fro`` and ``trace`` save the matrix and run the iteration again in the backward, keeping one iterate and one
    product; ``inf`` and ``one`` save the powers and the row. These are returned beside the value because that is how a
    function that works under torch.func hands over what it computed.
    """

    @staticmethod
    def forward(matrix: Tensor, iterations: int, norm: Norm) -> tuple[Tensor, ...]:
        require_finite("gram_norm", "matrix", matrix)
        value, kept = _bound(matrix, iterations, norm)
        return value, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, Norm], output: tuple[Tensor, ...]) -> None:
        matrix, ctx.iterations, ctx.norm = inputs
        value, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(matrix, value, *kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        matrix, value, *kept = ctx.saved_tensors
        with full_precision(matrix):
            gradient = gram_gradient(matrix, value, ctx.iterations, ctx.norm, kept)
            return scale_by(gradient, grad), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], matrix: Tensor, iterations: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = run(_GramNorm, matrix.movedim(in_dims[0], 0), iterations, norm)
        return outputs, (0,) * len(outputs)


def gram_values(matrix: Tensor, iterations: int) -> Tensor:
    """The ``fro`` bound without checks and without its own backward, for use inside other functions."""
    return _bound(matrix, iterations, "fro")[0]


def _bound(matrix: Tensor, iterations: int, norm: Norm) -> tuple[Tensor, list[Tensor]]:
    """The bound, and what the gradient of a row sum needs: the row and the powers."""
    scaled, scale = balanced(wide(matrix))
    if iterations == 0:
        return scale * (_balance(matrix) * frobenius(scaled)), []
    powers = Powers.of(scaled @ scaled.mH, iterations, keep=norm in ROW_SUMS)
    kept = []
    if norm in ROW_SUMS:
        reading, row = _row_sums(powers.last()).max(-1)
        kept = [row, *powers.tensors]
    else:
        reading = _reading(powers.last(), norm)
    value = torch.exp(powers.log + 2.0**-iterations * torch.log(reading))
    return scale * (_balance(matrix) * value), kept


def gram_gradient(
    matrix: Tensor, value: Tensor, iterations: int, norm: Norm = "fro", kept: Sequence[Tensor] = ()
) -> Tensor:
    r"""Gradient of the bound ``value`` with respect to the matrix, in the matrix's shape.

    The bound f is a function of G_t = G^(2^(t-1)), G = WW*. With C the derivative of the reading at G_t, the
    derivative with respect to W is proportional to

    * Z = C·G_1·G_2···G_(t-1)·W where C commutes with G (``fro``: C = G_t; ``trace``: C = αI + βG_t),
    * Z = (Σ G^a C G^b)·W over a + b = 2^(t-1) - 1 otherwise.

    f is homogeneous of degree 1, so <∇f, W> = f and ∇f = f·Z/<Z, W>: every scale factor cancels.
    """
    scaled, scale = balanced(wide(matrix))
    if iterations == 0:
        direction = scaled
    elif norm in ROW_SUMS:
        row, *stored = kept
        # A second derivative must see how the powers depend on the matrix: then they are computed again.
        again = torch.is_grad_enabled()
        powers = Powers.of(scaled @ scaled.mH, iterations) if again else Powers.stored(iterations, stored)
        order = torch.arange(scaled.shape[-2], device=row.device)
        unit = (order == row[..., None]).to(scaled.dtype)[..., None]
        direction = powers.pull_back_pair(unit, torch.sgn(powers.times(unit)), scaled)
    else:
        direction = _commuting_direction(scaled, iterations, norm)
    inner = (real_view(direction) * real_view(scaled)).sum((-3, -2, -1))
    gradient = scale_by(direction, value / positive(scale) / (_balance(matrix) * positive(inner)))
    return gradient if matrix.shape[-2] <= matrix.shape[-1] else gradient.mH


def _commuting_direction(scaled: Tensor, iterations: int, norm: Norm) -> Tensor:
    """C·G_1···G_(t-1)·W up to a factor, with one iterate and one product in memory."""
    gram = scaled @ scaled.mH
    product: Tensor | None = None
    for _ in range(1, iterations):
        product = gram if product is None else divided(product @ gram)[0]
        gram, _ = divided(gram @ gram)
    cotangent = gram if norm == "fro" else _trace_cotangent(gram)
    return (cotangent if product is None else cotangent @ product) @ scaled


def _reading(iterate: Tensor, norm: Norm) -> Tensor:
    if norm == "fro":
        return frobenius(iterate)
    mean, deviation = _mean_and_deviation(iterate)
    order = iterate.shape[-1]
    return mean + math.sqrt((order - 1) / order) * frobenius(deviation)


def _trace_cotangent(iterate: Tensor) -> Tensor:
    """I/r + √((r-1)/r)·N with N = (G - mI)/‖G - mI‖_F.

    Where G is a multiple of the identity every traceless N with ‖N‖_F <= 1 is a subgradient; 0/positive(0) picks 0.
    """
    _, deviation = _mean_and_deviation(iterate)
    order = iterate.shape[-1]
    slope = math.sqrt((order - 1) / order) / positive(frobenius(deviation))
    return torch.eye(order, dtype=iterate.dtype, device=iterate.device) / order + scale_by(deviation, slope)


def _mean_and_deviation(iterate: Tensor) -> tuple[Tensor, Tensor]:
    mean = torch.real(iterate.diagonal(dim1=-2, dim2=-1)).mean(-1)
    eye = torch.eye(iterate.shape[-1], dtype=iterate.dtype, device=iterate.device)
    return mean, iterate - mean[..., None, None] * eye


def _row_sums(iterate: Tensor) -> Tensor:
    return iterate.abs().sum(-1)


def wide(matrix: Tensor) -> Tensor:
    """The matrix or its adjoint, whichever has no more rows than columns: WW* is then the smaller Gram matrix."""
    return (matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mH).resolve_conj()


def balanced(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix divided by its largest absolute entry and by :func:`_balance`; and that entry.

    The eigenvalue λ1 of WW* is then between (pq)^(-1/2) and (pq)^(1/2), and its fourth power a moderate number.
    """
    scale = matrix.detach().abs().amax((-2, -1))
    # Of the real view: complex quotients by subnormal numbers are NaN.
    parts = real_view(matrix) / positive(scale)[..., None, None, None] / _balance(matrix)
    return torch.view_as_complex(parts) if matrix.is_complex() else parts[..., 0], scale


def _balance(matrix: Tensor) -> float:
    return math.sqrt(math.sqrt(matrix.shape[-2] * matrix.shape[-1]))


def frobenius(matrix: Tensor) -> Tensor:
    """Frobenius norms. On the real view: torch's norm of complex numbers takes a slow hypotenuse per entry."""
    norms: Tensor = torch.linalg.vector_norm(real_view(matrix), dim=(-3, -2, -1))
    return norms
