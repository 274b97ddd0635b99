"""Orders, lengths and normalisations, also written out; a finite constant is expected of every KNOWN."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_cases import assert_constant, exported, function
from auditing_networks import Function
from reference import jacobian_norm

ROWS, EPSILON = (4, 6), 1e-2


def centred(x):
    return x - x.mean(-1, keepdim=True)


def by_pair(x):
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * (variance + EPSILON).rsqrt() * 2 + 1


def squares(x):
    return x.square().mean(-1, keepdim=True)


KNOWN = {
    "largest entry": (lambda x: x.amax((1, 2)), 1),
    "sort": (lambda x: x.sort(1).values, 1),
    "topk": (lambda x: x.topk(3, 1).values, 1),
    "kthvalue": (lambda x: x.kthvalue(2, 1).values, 1),
    "median": (lambda x: x.median(1).values, 1),
    "median of all": (lambda x: x.median(), 1),
    "logsumexp": (lambda x: (20 * x).logsumexp((1, 2)), 20),
    "norm 1": (lambda x: x.norm(p=1, dim=-1), math.sqrt(6)),
    "norm 2": (lambda x: x.norm(dim=-1), 1),
    "norm of all": (lambda x: torch.linalg.norm(x, dim=(1, 2)), 1),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, float("inf"), -1), 1),
    "standard deviation": (lambda x: x.std((1, 2)), 1 / math.sqrt(23)),
    "of the whole": (lambda x: x.std(2, correction=0, keepdim=True), 1 / math.sqrt(6)),
    "and mean": (lambda x: torch.std_mean(x, 2)[0], 1 / math.sqrt(5)),
}
NORMALISATIONS = {
    "by var": lambda x: centred(x) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + EPSILON),
    "by var of a sample": lambda x: centred(x) / torch.sqrt(x.var(-1, keepdim=True) + EPSILON),
    "by rsqrt": lambda x: centred(x) * torch.rsqrt(x.var(-1, keepdim=True) + EPSILON),
    "by squares": lambda x: centred(x) / torch.sqrt(squares(centred(x)) + EPSILON),
    "by a reciprocal": lambda x: centred(x) * (1 / torch.sqrt(squares(centred(x))[..., 0] + EPSILON))[..., None],
    "by a power": lambda x: centred(x) * (squares(centred(x)) + EPSILON).pow(-0.5).expand(1, 4, 6),
    "rms": lambda x: x * torch.rsqrt(squares(x) + EPSILON),
    "rms of a copy": lambda x: x * torch.rsqrt(squares(x.clone()) + EPSILON),
}


@pytest.mark.parametrize("name", KNOWN)
def test_orders_and_lengths_have_their_constant(name):
    action, constant = KNOWN[name]
    assert_constant(function(action), ROWS, constant, reached=0.4)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_a_normalisation_that_is_written_out_is_known(name):
    model = function(NORMALISATIONS[name])
    found = assert_constant(model, ROWS, 1 / math.sqrt(EPSILON), scale=1e-3, reached=0.99)
    assert found.upper >= float(jacobian_norm(model, torch.zeros(1, *ROWS)))


def test_mean_and_variance_together():
    """Finite, twice that of the normalisation."""
    assert_constant(function(by_pair), ROWS, 2 / math.sqrt(EPSILON), scale=1e-3, reached=0.99)


def test_a_file_has_the_constant_of_the_module(tmp_path):
    for name in ("by var", "by rsqrt", "rms"):
        model = function(NORMALISATIONS[name], torch.zeros(1))
        model.function = lambda x, _, action=NORMALISATIONS[name]: action(x)
        path = exported(model, ROWS, tmp_path / f"{name}.pt2")
        assert gramcert.audit(path, ROWS).upper == gramcert.audit(model, ROWS).upper < math.inf


def test_the_mean_of_the_negative_value_is_no_centring():
    """Finite: 2, at a constant vector."""
    model = function(lambda x: -x - x.mean(-1, keepdim=True))
    found = gramcert.audit(model, (6,))
    assert 2 - 1e-12 <= float(jacobian_norm(model, torch.zeros(1, 6))) <= found.upper <= 2 * (1 + 1e-2)


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised each time."""

    def __init__(self, way):
        super().__init__(3, 4, 3, padding=1)
        self.way = way

    def standardised(self):
        weight, axes = self.weight, (1, 2, 3)
        if self.way == "std":
            return (weight - weight.mean(axes, keepdim=True)) / (weight.std(axes, keepdim=True) + 1e-5)
        if self.way == "var_mean":
            variance, mean = torch.var_mean(weight, axes, keepdim=True)
            return (weight - mean) * torch.rsqrt(27 * variance + 1e-4)
        if self.way == "batch norm":
            return F.batch_norm(weight.reshape(1, 4, -1), None, None, training=True, momentum=0.0).reshape_as(weight)
        return F.layer_norm(weight.flatten(1), (27,)).view_as(weight)

    def forward(self, x):
        return F.conv2d(x, self.standardised(), self.bias, padding=1)


@pytest.mark.parametrize("way", ["std", "var_mean", "batch norm", "layer norm"])
def test_standardised_weights_are_constants(way):
    """Finite: the norm of the convolution with the standardised weight."""
    torch.manual_seed(0)
    model = Standardised(way).double().eval()
    with torch.no_grad():
        plain = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
        plain.weight.copy_(model.standardised())
    found = gramcert.audit(model, (3, 6, 6))
    assert found.upper == gramcert.audit(plain.eval(), (3, 6, 6)).upper < math.inf
    assert gramcert.verify(found.certificate, model).holds


UNBOUNDED = {
    "without epsilon": lambda x: centred(x) / x.std(-1, keepdim=True),
    "epsilon outside": lambda x: centred(x) / (x.std(-1, keepdim=True) + EPSILON),
    "of other lines": lambda x: x * torch.rsqrt(squares(x).flip(1) + EPSILON),
    "of another value": lambda x: x * torch.rsqrt(squares(2 * x) + EPSILON),
    "shifted": lambda x: (x + 1) * torch.rsqrt(squares(x) + EPSILON),
    "negative epsilon": lambda x: x * torch.rsqrt(squares(x) - EPSILON),
    "inverse root": lambda x: torch.rsqrt(squares(x) + EPSILON) * torch.rsqrt(squares(x) + EPSILON),
    "variance": lambda x: x.var(-1),
    "variance of one": lambda x: x[..., :1].std(-1),
    "topk in any order": lambda x: x.topk(2, 1, sorted=False).values,
    "indices": lambda x: x + x.max(1).indices.to(x.dtype).reshape(-1)[1:].sum(),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, -1),
    "norm ½": lambda x: torch.linalg.vector_norm(x, 0.5, -1),
    "norm of matrices": lambda x: torch.linalg.norm(x, ord=2, dim=(1, 2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_only_looks_like_it_is_unbounded(name):
    found = gramcert.audit(Function(UNBOUNDED[name]), ROWS)
    assert found.upper == math.inf
    assert found.reasons
