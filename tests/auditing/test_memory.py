"""Values whose memory is overwritten through another name: followed where they are one value, refused elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import TOL, Function, audited, expect
from reference import sigma

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export

OVERWRITTEN = "its memory was overwritten through another name"


def write_into_zeros(x):
    o = torch.zeros(1, 4, dtype=x.dtype)
    o[:, :2] = x[:, :2] * 30
    return o + x


def write_into_ones(x):
    m = torch.ones(4, dtype=x.dtype)
    m[0] = 50.0
    return x * m


def write_into_weight(x, w):
    w = w.clone()
    w[0].mul_(50.0)
    return x @ w.T


def write_through(view, value=lambda x: x * 1):
    def function(x):
        t = value(x)
        F.leaky_relu_(view(t), 3.0)
        return t + 0

    return function


def overlapping(x):
    y = (x * 1).unfold(1, 2, 1)
    y.mul_(2)
    return y


def statistics(x, mean, variance):
    F.batch_norm(x[:, None], mean, variance, training=True, momentum=1.0)
    return x * variance


# Functions of four entries, and why they have no constant.
WRITTEN = {
    "zeros": (Function(write_into_zeros), f"zeros: {OVERWRITTEN}"),
    "ones": (Function(write_into_ones), f"ones: {OVERWRITTEN}"),
    "weight": (Function(write_into_weight, w=torch.ones(4, 4)), f"clone: {OVERWRITTEN}"),
    "input": (Function(write_through(lambda t: t[:, :2], lambda x: x)), f"x: {OVERWRITTEN}"),
    "chunk of the input": (Function(write_through(lambda t: t.chunk(2, 1)[0], lambda x: x)), f"x: {OVERWRITTEN}"),
    **{
        name: (Function(write_through(view)), f"mul: {OVERWRITTEN}")
        for name, view in {
            "slice": lambda t: t[:, :2],
            "swapdims": lambda t: t.swapdims(0, 1),
            "ravel": torch.ravel,
            "broadcast_to": lambda t: t.broadcast_to(1, 4),
            "as_strided": lambda t: t.as_strided((1, 4), (4, 1)),
            "reshape": lambda t: t.reshape(4),
            "unsafe split": lambda t: t.unsafe_split(2, 1)[0],
        }.items()
    },
    "overlapping view": (Function(overlapping), "what is written is not followed"),
    "statistics": (Function(statistics, m=torch.zeros(1), v=torch.ones(1)), "it changes its own parameters or buffers"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_through_another_name_has_no_constant(name):
    model, reason = WRITTEN[name]
    expect(gramcert.audit(model.eval(), (4,)), reason)


def test_in_place_activations_act_on_their_own_value():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            z = torch.nn.functional.leaky_relu_(y, 3.0)
            return y + z  # y has been overwritten: twice z

    torch.manual_seed(0)
    model, found = audited(Block(), (4,))
    norm = float(sigma(model.linear.weight.detach()))
    assert 6 * norm <= found.upper <= 6 * norm * (1 + 2 * TOL)
