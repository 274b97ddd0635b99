r"""Sums of products of one value with constants, in Einstein's notation: products of matrices in all their forms.

Axes are named by labels. Those of the value x and of the product w of the constants fall into four kinds:

    y[f, b, m] = Σ_k w[b, m, k]·x[f, b, k],

f free, in x and y alone; b shared by all three; k summed; m new. Without b this is the matrix w along the axis k,
I ⊗ w; with it, a matrix for each b, diag(w_b), whose norm is the largest of theirs and which a grouped convolution with
one tap is. Axes that are only summed are those of I ⊗ w ⊗ 1ᵀ, whose norm is the product of both norms: so they may be
summed first, and nothing is lost.
"""

import math

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.operators.graph import BadModel, Builder, Variable
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.operators.rules import Unknown, exact, reduce_linear
from gramcert.rounding import gamma, norm_up, underflow, up

Labels = list[str]
Constant = tuple[Tensor, Labels]

# Labels that torch.einsum can tell apart.
MOST_LABELS = 52


def parsed(equation: str, dims: list[int]) -> tuple[list[Labels], Labels]:
    """Labels of the operands, which have so many axes, and of the result; axes behind dots are counted from the last.

    Raises:
        Unknown: the equation does not fit the operands.
    """
    text, arrow, after = equation.replace(" ", "").partition("->")
    terms = text.split(",")
    if len(terms) != len(dims):
        raise Unknown(f"the equation {equation!r} for {len(dims)} operands")
    operands = [_labels(term, dim) for term, dim in zip(terms, dims, strict=True)]
    dots = sorted({label for labels in operands for label in labels if label.startswith(".")}, reverse=True)
    if arrow:
        if dots and "..." not in after:
            raise Unknown(f"the equation {equation!r} sums over axes without a name")
        result = _labels(after, len(after.replace("...", "")) + len(dots))
    else:
        letters = [label for labels in operands for label in labels if not label.startswith(".")]
        result = dots + sorted(label for label in set(letters) if letters.count(label) == 1)
    if len(set(result)) != len(result) or not set(result) <= {label for labels in operands for label in labels}:
        raise Unknown(f"the equation {equation!r}")
    return operands, result


def _labels(term: str, dim: int) -> Labels:
    before, dots, after = term.partition("...")
    hidden = dim - len(before) - len(after)
    if (not (before + after).isalpha() and before + after) or hidden < 0 or (hidden and not dots):
        raise Unknown(f"{term!r} for {dim} axes")
    # Of equal length, so that they sort as their numbers do.
    return [*before, *(f".{axis:02}" for axis in reversed(range(hidden))), *after]


def matrix_labels(first: int, second: int) -> tuple[Labels, Labels, Labels]:
    """Of a matrix product of operands with so many axes, as torch.matmul takes them, and of its result."""
    if min(first, second) < 1:
        raise Unknown("a product with a number")
    batch = [f".{axis:02}" for axis in reversed(range(max(first, second, 2) - 2))]
    one = [*batch[len(batch) - max(0, first - 2) :], *("ij" if first > 1 else "j")]
    two = [*batch[len(batch) - max(0, second - 2) :], *("jk" if second > 1 else "j")]
    return one, two, [*batch, *("i" if first > 1 else ""), *("k" if second > 1 else "")]


def contracted(
    b: Builder, x: Variable, labels: Labels, constants: list[Constant], output: Labels, distance: float = 0.0
) -> Variable:
    """The sum of products, of which x is one factor and the constants are the others.

    Args:
        b: where it is made.
        x: the value that depends on the input.
        labels: of its axes.
        constants: with theirs.
        output: labels of the result.
        distance: of a single constant, of which no axis is summed alone, from the true one in the Frobenius norm.
    """
    x, labels = _without_repeats(b, x, labels)
    factors = [_diagonal(exact(constant), names) for constant, names in constants]
    sizes = dict(zip(labels, x.shape, strict=True))
    for constant, names in factors:
        for label, size in zip(names, constant.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    x, labels = _without_ones(b, x, labels, sizes)
    factors = [_without_single(constant, names, sizes) for constant, names in factors]
    used = {label for _, names in factors for label in names}
    alone = [axis for axis, label in enumerate(labels) if label not in used and label not in output]
    if alone:
        x = reduce_linear(b, x, alone, keep=False, mean=False)
        labels = [label for axis, label in enumerate(labels) if axis not in alone]
    if not factors:
        return _ordered(b, x, labels, output)
    weight, names, rounding = _multiplied(factors, {*labels, *output})
    distance = up(distance + rounding) if rounding else distance
    # A batch of one matrix is a matrix.
    single = [label for label in names if label in labels and label in output and sizes[label] == 1]
    weight = weight.squeeze([names.index(label) for label in single]) if single else weight
    names = [label for label in names if label not in single]
    return _applied(b, x, labels, (weight, names), output, distance)


def _applied(b: Builder, x: Variable, labels: Labels, factor: Constant, output: Labels, distance: float) -> Variable:
    weight, names = factor
    summed = [label for label in labels if label in names and label not in output]
    shared = [label for label in labels if label in names and label in output]
    free = [label for label in labels if label not in names]
    new = [label for label in names if label not in labels]
    if not summed and not new:
        factors = weight.permute([names.index(label) for label in shared])
        shape = [size if label in names else 1 for label, size in zip(labels, x.shape, strict=True)]
        return _ordered(b, b.scaled(x, factors.reshape(shape), distance), labels, output)
    sizes = dict(zip(labels, x.shape, strict=True)) | dict(zip(names, weight.shape, strict=True))
    groups, inner, outer = (math.prod(sizes[label] for label in kind) for kind in (shared, summed, new))
    matrices = weight.permute([names.index(label) for label in [*shared, *new, *summed]]).reshape(-1, inner)
    if not shared:
        if len(summed) == 1:
            axis = labels.index(summed[0])
            order = [*labels[:axis], *new, *labels[axis + 1 :]]
        else:
            axis, order = len(free), [*free, *new]
            x = _shaped(b, _ordered(b, x, labels, [*free, *summed]), (*(sizes[label] for label in free), inner))
        y = b.linear(x, AxisMatrix(x.shape, matrices.contiguous(), axis, distance))
    else:
        x = _shaped(b, _ordered(b, x, labels, [*shared, *summed, *free]), (1, groups * inner, -1))
        layer = Convolution(matrices.reshape(groups * outer, inner, 1).contiguous(), groups=groups)
        y, order = b.linear(x, Convolve(x.shape, layer, distance)), [*shared, *new, *free]
    return _ordered(b, _shaped(b, y, tuple(sizes[label] for label in order)), order, output)


def _multiplied(factors: list[Constant], kept: set[str]) -> tuple[Tensor, Labels, float]:
    r"""The product of the constants, summed over axes that only they have, and how far it is from the true one.

    Each entry is off by γ_n times the sum of the absolute values of its n products, of a few factors each; so is, in
    the Frobenius norm, the whole.
    """
    everything = list(dict.fromkeys(label for _, names in factors for label in names))
    names = [label for label in everything if label in kept]
    if len(everything) > MOST_LABELS:
        raise Unknown(f"{len(everything)} axes")
    if len(factors) == 1 and names == everything:
        return factors[0][0], names, 0.0
    places = {label: place for place, label in enumerate(everything)}
    sizes = {label: size for tensor, labels in factors for label, size in zip(labels, tensor.shape, strict=True)}
    terms = math.prod(sizes[label] for label in everything if label not in kept)
    sublists = [[places[label] for label in labels] for _, labels in factors]
    result = [places[label] for label in names]
    products = []
    for signed in (True, False):
        parts = [tensor if signed else tensor.abs() for tensor, _ in factors]
        operands = [item for part, sublist in zip(parts, sublists, strict=True) for item in (part, sublist)]
        products.append(torch.einsum(*operands, result))
    weight, sizes_of = exact(products[0]), exact(products[1])
    count = terms + len(factors) + 1
    small = underflow(len(factors) * terms * weight.numel())
    return weight, names, up(up(gamma(2 * count) * norm_up(sizes_of)) + small)


def _without_repeats(b: Builder, x: Variable, labels: Labels) -> tuple[Variable, Labels]:
    """The diagonal where a label occurs twice."""
    if len(set(labels)) == len(labels):
        return x, labels
    names = list(dict.fromkeys(labels))
    return b.moved(x, lambda places: _diagonal(places, labels)[0], "diagonal"), names


def _diagonal(tensor: Tensor, labels: Labels) -> Constant:
    """Entries at which axes of the same label have the same place."""
    names, labels = list(dict.fromkeys(labels)), list(labels)
    for label in names:
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            if tensor.shape[first] != tensor.shape[second]:
                raise BadModel(f"axes of {tensor.shape[first]} and {tensor.shape[second]} places with one label")
            tensor = tensor.diagonal(0, first, second)
            del labels[second], labels[first]
            labels.append(label)
    return tensor.permute([labels.index(label) for label in names]), names


def _without_ones(b: Builder, x: Variable, labels: Labels, sizes: dict[str, int]) -> tuple[Variable, Labels]:
    """Without axes of one place that other operands have more of: they are theirs alone."""
    _require_broadcast(x.shape, labels, sizes)
    kept = [axis for axis, label in enumerate(labels) if x.shape[axis] == sizes[label]]
    shape = tuple(x.shape[axis] for axis in kept)
    return _shaped(b, x, shape), [labels[axis] for axis in kept]


def _without_single(constant: Tensor, labels: Labels, sizes: dict[str, int]) -> Constant:
    _require_broadcast(tuple(constant.shape), labels, sizes)
    kept = [axis for axis, label in enumerate(labels) if constant.shape[axis] == sizes[label]]
    return constant.reshape([constant.shape[axis] for axis in kept]), [labels[axis] for axis in kept]


def _require_broadcast(shape: tuple[int, ...], labels: Labels, sizes: dict[str, int]) -> None:
    for size, label in zip(shape, labels, strict=True):
        if size not in (1, sizes[label]):
            raise BadModel(f"axes of {size} and {sizes[label]} places with one label")


def _ordered(b: Builder, x: Variable, labels: Labels, wanted: Labels) -> Variable:
    if set(labels) != set(wanted):
        raise Unknown("a result with axes that no operand has")
    order = [labels.index(label) for label in wanted]
    if order == list(range(x.dim)):
        return x
    return b.moved(x, lambda places: places.permute(order), "transpose")


def _shaped(b: Builder, x: Variable, shape: tuple[int, ...]) -> Variable:
    return x if x.shape == shape else b.moved(x, lambda places: places.reshape(shape))
