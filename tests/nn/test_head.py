from fractions import Fraction

import pytest
import torch
from torch import nn

from gramcert import lipschitz_bound
from gramcert.nn import NormalizedLinear


def test_rows_have_length_one():
    head = NormalizedLinear(7, 4)
    head.weight = 1e-25 * torch.randn(4, 7)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(4))
    head.weight = torch.zeros(4, 7)
    assert torch.equal(head.weight, torch.zeros(4, 7))
    assert lipschitz_bound(head) == 0


def test_radius_is_a_lower_bound_of_the_exact_one():
    """Against exact rational arithmetic: radius² ≤ margin²/(L²·‖w_y - w_i‖²), and hardly less."""
    head = NormalizedLinear(5, 3)
    logits = head(torch.randn(20, 5)).detach()
    lipschitz = 1.25
    weight = [[Fraction(float(v)) for v in row] for row in head.weight.detach()]
    for row, radius in zip(logits, head.radius(logits, lipschitz), strict=True):
        values = [Fraction(float(v)) for v in row]
        winner = max(range(3), key=values.__getitem__)
        squares = []
        for i in set(range(3)) - {winner}:
            distance = sum((a - b) ** 2 for a, b in zip(weight[winner], weight[i], strict=True))
            squares.append((values[winner] - values[i]) ** 2 / (Fraction(lipschitz) ** 2 * distance))
        exact, found = min(squares), Fraction(float(radius)) ** 2
        assert found <= exact <= found * Fraction(1 + 1e-12)


def test_radius_is_real():
    """No input nearer than the radius changes the class, and in two dimensions one just beyond it does."""
    head = NormalizedLinear(2, 3, dtype=torch.float64)
    for x in torch.randn(50, 2, dtype=torch.float64):
        logits = head(x[None])
        radius = head.radius(logits)[0]
        winner = int(logits.argmax())
        angles = torch.linspace(0, 6.2832, 721, dtype=torch.float64)
        circle = torch.stack([angles.cos(), angles.sin()], 1)
        assert (head(x + 0.999999 * radius * circle).argmax(1) == winner).all()
        assert (head(x + 1.001 * radius * circle).argmax(1) != winner).any()


def test_ties_certify_nothing():
    head = NormalizedLinear(2, 2)
    assert float(head.radius(torch.tensor([[1.0, 1.0]]))[0]) == 0
    # Equal rows never change places: no input can.
    head.weight = torch.ones(2, 2)
    assert float(head.radius(torch.tensor([[1.0, 1.0]]))[0]) == 0
    assert float(head.radius(torch.tensor([[2.0, 1.0]]))[0]) > 1e100


def test_bad_input():
    head = NormalizedLinear(2, 3)
    with pytest.raises(ValueError, match=r"radius\(logits\): expected shape \(batch, 3\), got \(1, 2\)"):
        head.radius(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"radius\(lipschitz=0.0\): expected a positive number"):
        head.radius(torch.zeros(1, 3), 0)
    with pytest.raises(ValueError, match="expected at least two outputs"):
        NormalizedLinear(2, 1).radius(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="expected finite logits"):
        head.radius(torch.full((1, 3), torch.nan))
    assert isinstance(head, nn.Linear)
