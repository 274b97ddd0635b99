import math

import pytest
import torch

from gramcert.nn import HingeMargin, LogitAnnealing, OffsetCrossEntropy, margins

LOGITS = torch.tensor([[2.0, 0.0, 1.0], [0.5, 0.5, -1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1])


def test_offset_cross_entropy_from_its_formula():
    loss = OffsetCrossEntropy()
    total = 0.0
    for row, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        shifted = [(v - (3 * math.sqrt(2) / 2 if i == label else 0)) / 0.25 for i, v in enumerate(row)]
        total += 0.25 * (math.log(sum(map(math.exp, shifted))) - shifted[label])
    assert float(loss(LOGITS, LABELS)) == pytest.approx(total / 2)


def test_margins_and_hinge():
    assert margins(LOGITS, LABELS).tolist() == [1.0, 0.0]
    assert float(HingeMargin(1.5)(LOGITS, LABELS)) == pytest.approx((0.5 + 1.5) / 2)


def test_logit_annealing():
    """Without annealing it is the cross-entropy; with it, samples far ahead weigh nothing, and nothing is NaN."""
    plain, annealed = LogitAnnealing(power=0), LogitAnnealing(offset=0.5, temperature=0.75, power=5)
    assert float(plain(LOGITS, LABELS)) == pytest.approx(float(OffsetCrossEntropy()(LOGITS, LABELS)))
    probability = torch.softmax((LOGITS - 0.5 * torch.nn.functional.one_hot(LABELS, 3)) / 0.75, 1)[[0, 1], LABELS]
    expected = (-0.75 * (1 - probability) ** 5 * probability.log()).mean()
    assert float(annealed(LOGITS, LABELS)) == pytest.approx(float(expected))
    sure = torch.tensor([[1e4, 0.0], [0.0, 1e4]], requires_grad=True)
    annealed(sure, torch.tensor([0, 0])).backward()
    assert torch.isfinite(sure.grad).all()
    assert sure.grad[0].abs().max() == 0
    assert sure.grad[1].abs().max() > 0


@pytest.mark.parametrize("loss", [OffsetCrossEntropy(), LogitAnnealing()])
def test_gradients(loss):
    assert torch.autograd.gradcheck(lambda x: loss(x, LABELS), (LOGITS.clone().requires_grad_(),))


def test_bad_input():
    for make in (
        lambda: OffsetCrossEntropy(temperature=0),
        lambda: LogitAnnealing(temperature=-1),
        lambda: HingeMargin(0),
    ):
        with pytest.raises(ValueError, match="expected a positive number"):
            make()
    with pytest.raises(ValueError, match=r"power=-1\): expected a number that is not negative"):
        LogitAnnealing(power=-1)
    with pytest.raises(ValueError, match=r"expected \(batch, classes\) and \(batch,\), got \(2, 3\) and \(3,\)"):
        margins(LOGITS, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(1,\)"):
        LogitAnnealing()(torch.ones(2, 3), torch.tensor([0]))
