"""Operators of torch: products with constant matrices and tensors in all their forms, sums along an axis."""

import math
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing.aten_arguments import Arguments, Context, Rule, known, registering, require_real
from gramcert.operators import contraction, rules
from gramcert.operators.contraction import Labels
from gramcert.operators.graph import MOST_ENTRIES, Variable
from gramcert.operators.rules import Unknown

RULES: dict[str, Rule] = {}
rule = registering(RULES)

BOTH = "a product of two values that both depend on the input"

_EQUATIONS = {
    "mm": "ij,jk->ik",
    "bmm": "bij,bjk->bik",
    "mv": "ij,j->i",
    "dot": "i,i->",
    "vdot": "i,i->",
    "outer": "i,j->ij",
    "ger": "i,j->ij",
    "addmm": "ij,jk->ik",
    "baddbmm": "bij,bjk->bik",
    "addbmm": "bij,bjk->ik",
    "addmv": "ij,j->i",
    "addr": "i,j->ij",
}


def _contracted(t: Context, operands: list[Any], labels: list[Labels], output: Labels) -> Variable:
    """The product of one value that depends on the input and of constants."""
    terms = list(zip(map(known, operands), labels, strict=True))
    variables = [(operand, names) for operand, names in terms if isinstance(operand, Variable)]
    if len(variables) != 1:
        raise Unknown(BOTH)
    constants = [(operand, names) for operand, names in terms if isinstance(operand, Tensor)]
    return contraction.contracted(t.b, *variables[0], constants, output)


def _by_equation(t: Context, equation: str, operands: list[Any]) -> Variable:
    labels, output = contraction.parsed(equation, [len(known(operand).shape) for operand in operands])
    return _contracted(t, operands, labels, output)


@rule("einsum")
def _einsum(t: Context, a: Arguments) -> Variable:
    return _by_equation(t, str(a.get("equation")), a.get("tensors"))


@rule("matmul")
def _matmul(t: Context, a: Arguments) -> Variable:
    operands = [known(a.values["self"]), known(a.values["other"])]
    *labels, output = contraction.matrix_labels(*(len(operand.shape) for operand in operands))
    return _contracted(t, operands, labels, output)


@rule("mm", "bmm", "mv", "dot", "vdot", "outer", "ger")
def _product(t: Context, a: Arguments) -> Variable:
    second = next(a.values[name] for name in ("mat2", "vec", "vec2", "tensor", "other") if name in a.values)
    return _by_equation(t, _EQUATIONS[a.op], [a.values["self"], second])


@rule("addmm", "baddbmm", "addbmm", "addmv", "addr")
def _added(t: Context, a: Arguments) -> Variable:
    """β·self + α·product."""
    names = ("mat1", "mat2", "batch1", "batch2", "mat", "vec", "vec1", "vec2")
    base, factors = known(a.values["self"]), [known(a.values[name]) for name in names if name in a.values]
    alpha, beta, like = a.number("alpha", 1), a.number("beta", 1), t.like(*a.values.values())
    if isinstance(base, Variable) and beta != 1:
        base = rules.times(t.b, base, beta, like)
    if not any(isinstance(factor, Variable) for factor in factors):
        product = torch.einsum(_EQUATIONS[a.op], *(rules.exact(factor) for factor in factors))
        return _plus_rounded(t, base, rules.exact(product, "summand"))
    y = _by_equation(t, _EQUATIONS[a.op], factors)
    y = y if alpha == 1 else rules.times(t.b, y, alpha, like)
    if beta == 0:
        return y
    if beta != 1 and isinstance(base, Tensor):
        return _plus_rounded(t, y, rules.exact(base, "summand"))
    return t.patterns.sum(y, base, 1, like)


def _plus_rounded(t: Context, x: Variable, constant: Tensor) -> Variable:
    """Plus a multiple of a constant, or a product of constants, whose rounding is not followed."""
    return t.b.shifted(t.b.spread(x, tuple(constant.shape)), None)


@rule("inner")
def _inner(t: Context, a: Arguments) -> Variable:
    """Along the last axes of both."""
    operands = [known(a.values["self"]), known(a.values["other"])]
    labels = [[f"{name}{axis}" for axis in range(len(x.shape) - 1)] for name, x in zip("ab", operands, strict=True)]
    return _contracted(t, operands, [[*labels[0], "last"], [*labels[1], "last"]], [*labels[0], *labels[1]])


@rule("tensordot")
def _tensordot(t: Context, a: Arguments) -> Variable:
    operands = [known(a.values["self"]), known(a.values["other"])]
    labels = [[f"{name}{axis}" for axis in range(len(x.shape))] for name, x in zip("ab", operands, strict=True)]
    pairs = list(zip(a.ints("dims_self"), a.ints("dims_other"), strict=True))
    for number, (one, two) in enumerate(pairs):
        labels[0][one] = labels[1][two] = f"sum{number}"
    return _contracted(t, operands, labels, [label for names in labels for label in names if label[0] in "ab"])


@rule("kron")
def _kron(t: Context, a: Arguments) -> Variable:
    """Blocks of one operand, each times an entry of the other."""
    operands = [known(a.values["self"]), known(a.values["other"])]
    dim = max(len(operand.shape) for operand in operands)
    shapes = [(1,) * (dim - len(operand.shape)) + tuple(operand.shape) for operand in operands]
    labels = [[f"{name}{axis}" for axis in range(dim)] for name in "ab"]
    whole = [
        operand.reshape(shape) if isinstance(operand, Tensor) else _reshaped(t, operand, shape)
        for operand, shape in zip(operands, shapes, strict=True)
    ]
    y = _contracted(t, whole, labels, [label for pair in zip(*labels, strict=True) for label in pair])
    return _reshaped(t, y, tuple(math.prod(pair) for pair in zip(*shapes, strict=True)))


def _reshaped(t: Context, x: Variable, shape: tuple[int, ...]) -> Variable:
    return t.b.moved(x, lambda places: places.reshape(shape))


@rule("cumsum")
def _cumsum(t: Context, a: Arguments) -> Variable:
    require_real(a.get("dtype"))
    x = a.x()
    axis = rules.axis_of(a.get("dim"), x.dim)
    return rules.cumulative_sum(t.b, x, axis) if x.dim else t.b.same(x)


@rule("lerp")
def _lerp(t: Context, a: Arguments) -> Variable:
    r"""(1 - w)·start + w·end."""
    start, end, weight = (known(a.values[name]) for name in ("self", "end", "weight"))
    like = t.like(start, end)
    if isinstance(weight, Variable):
        raise Unknown("a weight that depends on the input")
    share = (
        rules.exact(weight)
        if isinstance(weight, Tensor)
        else torch.tensor(rules.typed(weight, like), dtype=torch.float64)
    )
    rest = 1 - share  # rounded once
    distance = 2.0**-52 * max(1.0, float(rest.abs().max()))
    if isinstance(start, Variable) and isinstance(end, Variable):
        return t.patterns.sum(t.b.scaled(start, rest, distance), t.b.scaled(end, share), 1, like)
    if isinstance(start, Variable):
        return _plus_rounded(t, t.b.scaled(start, rest, distance), rules.exact(end, "summand"))
    return _plus_rounded(t, t.b.scaled(end, share), rules.exact(start, "summand"))


@rule("addcmul", "addcdiv")
def _addcmul(t: Context, a: Arguments) -> Variable:
    """Self + value·(first · second), or first/second."""
    base, first, second = (known(a.values[name]) for name in ("self", "tensor1", "tensor2"))
    value, like, divide = a.number("value", 1), t.like(base, first, second), a.op == "addcdiv"
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        first, second = rules.exact(first, "summand"), rules.exact(second, "summand")
        return _plus_rounded(t, base, rules.exact(first / second if divide else first * second, "summand"))
    combined = t.patterns.quotient(first, second, like) if divide else t.patterns.product(first, second, like)
    combined = combined if value == 1 else rules.times(t.b, combined, value, like)
    return t.patterns.sum(base, combined, 1, like)


@rule("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def _filled(t: Context, a: Arguments) -> Tensor:
    """Constants in the shape of a value."""
    x = a.x()
    shape = tuple(a.ints("size")) if a.op.startswith("new") else x.shape
    if math.prod(shape) > MOST_ENTRIES or not all(isinstance(size, int) for size in shape):
        raise Unknown(f"a constant of shape {shape}")
    dtype = a.get("dtype", t.types.get(x.name, torch.float32))
    value = a.number("fill_value", 0) if "full" in a.op else float("ones" in a.op)
    return torch.full(shape, value, dtype=dtype)
