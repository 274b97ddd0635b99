"""Equations: what they say of axes, and that the graph's matrix is that of torch's own operator."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramcert.operators.contraction import contracted, matrix_labels, parsed
from gramcert.operators.graph import BadModel, Builder, Input
from gramcert.operators.linear import LinearMap
from gramcert.operators.rules import Unknown

ROUNDING = 1e3 * torch.finfo(torch.float64).eps


def matrix_of(builder, x):
    """Of the linear maps that lead to a value, and how far they may be from the true ones."""
    node, result, error = builder.node(x), None, 0.0
    while not isinstance(node.operation, Input):
        assert isinstance(node.operation, LinearMap)
        dense = node.operation.dense()
        result, error = dense if result is None else result @ dense, error + node.operation.error
        node = builder.graph.nodes[node.inputs[0]]
    return result, error


@st.composite
def equations(draw):
    """A value and up to two constants with axes of few labels, some of which remain."""
    terms = draw(st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=1, max_size=3))
    used = sorted({label for term in terms for label in term})
    output = draw(st.permutations(used)) if used else []
    output = output[: draw(st.integers(0, len(output)))]
    sizes = {label: draw(st.integers(1, 3)) for label in "abcd"}
    return terms, output, sizes


@given(equations(), st.integers(0, 2**16))
def test_every_equation_has_the_matrix_of_torch(case, seed):
    terms, output, sizes = case
    generator = torch.Generator().manual_seed(seed)
    operands = [
        torch.randn([sizes[label] for label in term], dtype=torch.float64, generator=generator) for term in terms
    ]
    equation = f"{','.join(map(''.join, terms))}->{''.join(output)}"
    labels, result = parsed(equation, [len(term) for term in terms])
    builder = Builder()
    x = builder.input("x", tuple(operands[0].shape))
    y = contracted(builder, x, labels[0], list(zip(operands[1:], labels[1:], strict=True)), result)
    units = torch.eye(operands[0].numel(), dtype=torch.float64).reshape(-1, *operands[0].shape)
    columns = [torch.einsum(equation, unit, *operands[1:]).flatten() for unit in units]
    truth = torch.stack(columns, 1)
    found, error = matrix_of(builder, y)
    found = torch.eye(len(units), dtype=torch.float64) if found is None else found
    assert y.shape == tuple(sizes[label] for label in output)
    assert float((found - truth).norm()) <= ROUNDING * (1 + float(truth.norm()))
    assert error <= ROUNDING * (1 + float(truth.norm()) * len(units))


def test_equations_are_read_as_torch_reads_them():
    assert parsed("ij , jk", [2, 2]) == ([["i", "j"], ["j", "k"]], ["i", "k"])
    assert parsed("b...j,jk->...kb", [4, 2])[1] == [".01", ".00", "k", "b"]
    assert parsed("ba", [2])[1] == ["a", "b"]
    assert matrix_labels(1, 3) == (["j"], [".00", "j", "k"], [".00", "k"])


@pytest.mark.parametrize("equation", ["ij->k", "ij->ii", "i->i", "ij,jk->ik", "i.j->i", "...->"])
def test_equations_that_do_not_fit_are_refused(equation):
    with pytest.raises(Unknown, match=r"equation|axes"):
        parsed(equation, [2])


def test_sizes_that_differ_are_refused():
    builder = Builder()
    x = builder.input("x", (2, 3))
    with pytest.raises(BadModel, match="with one label"):
        contracted(builder, x, ["i", "j"], [(torch.ones(4), ["j"])], ["i"])
