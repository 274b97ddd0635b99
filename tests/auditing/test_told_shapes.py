"""Shapes that a program tells behind unknown operators: for reasons only."""

import dataclasses

import torch

from auditing_networks import Function
from gramcert.auditing.aten import Translator
from gramcert.auditing.fixing import Passed
from gramcert.auditing.traced import traced
from gramcert.operators.propagation import Follower, Plan


def reasons(program, shapes):
    """Why a program is unbounded; empty if it is not."""
    told = dataclasses.replace(program, shapes=program.shapes | shapes)
    plan = Plan.of(Translator(told).run({"x": (1, 4)}).needed())
    plan.is_measured = not plan.is_unbounded
    return Follower(plan, lambda measurement: measurement.run(1e-2, None)).run().reasons


def test_no_told_shape_makes_a_program_bounded():
    """Unbounded whatever is told: a slice that would be empty, and a size that would be a factor."""
    model = Function(lambda x: x + torch.special.bessel_j0(x).reshape(-1)[1:].sum())
    program = traced(model.eval(), Passed.to("test", model, torch.zeros(1, 4), {}))
    name = next(call.outputs[0] for call in program.calls if "bessel" in call.target)
    assert reasons(program, {})
    assert reasons(program, {name: (1,)})
