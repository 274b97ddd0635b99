"""Models with several inputs, all but one of them fixed: from memory and from files, and what cannot be fixed."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gramcert
from gramcert.auditing.fixing import in_words
from gramcert.cli.app import app

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters

TOL = 1e-3


class Conditioned(nn.Module):
    """A linear layer, shifted by an embedding and scaled by a network of another input."""

    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(4, 3), nn.Embedding(5, 3)
        self.gate = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Sigmoid())

    def forward(self, x, label, time, scale=1.0):
        return scale * (self.linear(x) + self.embedding(label)) * self.gate(time)


class Masked(nn.Module):
    """The input where a mask allows it."""

    def forward(self, x, mask):
        return 3 * x.masked_fill(~mask, 0.0)


LABEL, TIME = torch.tensor([2]), torch.tensor([[0.25, 3.0]])
FIX = {"label": LABEL, "time": TIME}


def conditioned():
    torch.manual_seed(0)
    return Conditioned().eval()


def truth(model, **fixed):
    """The norm of the Jacobian of a model that is affine in its input."""
    jacobian = torch.func.jacrev(lambda x: model(x, **fixed))(torch.zeros(1, 4)).reshape(3, 4)
    return float(torch.linalg.matrix_norm(jacobian.double(), 2))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Both networks in both kinds of files."""
    folder = tmp_path_factory.mktemp("several")
    for name, model, given in (
        ("conditioned", conditioned(), (LABEL, TIME)),
        ("masked", Masked(), (torch.ones(1, 4, dtype=torch.bool),)),
    ):
        exported = torch.export.export(model, (torch.zeros(1, 4), *given))
        torch.export.save(exported, folder / f"{name}.pt2")
        program = torch.onnx.export(model, (torch.zeros(1, 4), *given), dynamo=True, optimize=False, verbose=False)
        program.save(folder / f"{name}.onnx", external_data=False)
    return folder


def sources(files):
    exported = torch.export.export(conditioned(), (torch.zeros(1, 4), LABEL, TIME))
    return [conditioned(), exported, files / "conditioned.pt2", files / "conditioned.onnx"]


def test_a_finite_constant_about_the_remaining_input(files):
    expected = truth(conditioned(), **FIX)
    eps = torch.finfo(torch.float32).eps
    for source in sources(files):
        found = gramcert.audit(source, (4,), fix=FIX, tol=TOL)
        assert found.reasons == ()
        assert expected * (1 - 16 * eps) <= found.upper <= expected * (1 + 2 * TOL)
        assert gramcert.verify(found.certificate, source, fix=FIX).holds


def test_other_values_have_another_finite_constant(files):
    for time in (0.0, 5.0):
        fix = {"label": 2, "time": time}
        expected = truth(conditioned(), label=LABEL, time=torch.full((1, 2), time))
        for name in ("conditioned.pt2", "conditioned.onnx"):
            found = gramcert.audit(files / name, fix=fix)  # a file that says its shape needs none
            assert expected * (1 - 1e-6) <= found.upper <= expected * (1 + 2 * TOL)
            assert found.input_shape == (4,)


def test_numbers_are_passed_to_modules_as_they_are():
    model = conditioned()
    one, two = (gramcert.audit(model, (4,), fix=FIX | {"scale": scale}) for scale in (1, 2.0))
    assert math.isfinite(one.upper)
    assert two.upper == pytest.approx(2 * one.upper, rel=2 * TOL)
    assert "the input scale is fixed to 2.0" in two.assumptions


@pytest.mark.parametrize("name", ["masked.pt2", "masked.onnx"])
@pytest.mark.parametrize("mask", [True, 1, torch.tensor([[False, True, False, False]])])
def test_masks_have_finite_constants(files, name, mask):
    found = gramcert.audit(files / name, fix={"mask": mask})
    assert 3 <= found.upper <= 3 * (1 + torch.finfo(torch.float32).eps)


def test_a_certificate_is_about_the_fixed_values(files):
    for source in sources(files):
        certificate = gramcert.audit(source, (4,), fix=FIX).certificate
        for other in ({"label": torch.tensor([3])}, {"time": TIME + 1}):
            found = gramcert.verify(certificate, source, fix=FIX | other)
            assert not found.holds
            assert found.problems[0].startswith("fix: the certificate is about the model with label = 2")
    found = gramcert.verify(certificate, files / "conditioned.onnx")  # where nothing is fixed it is another model
    assert found.problems[0].endswith("here it is nothing")


def test_a_fixed_input_without_effect_is_in_the_certificate_too():
    class Ignoring(nn.Module):
        def forward(self, x, other):
            return 2 * x

    certificate = gramcert.audit(Ignoring(), (4,), fix={"other": torch.zeros(3)}).certificate
    assert gramcert.verify(certificate, Ignoring(), fix={"other": torch.zeros(3)}).holds
    for other in (torch.ones(3), torch.zeros(4), -torch.zeros(3), torch.zeros(3).double()):
        assert not gramcert.verify(certificate, Ignoring(), fix={"other": other}).holds


def test_assumptions_say_what_was_fixed(files):
    found = gramcert.audit(files / "conditioned.pt2", fix=FIX)
    assert "the input label is fixed to 2 (int64, 1)" in found.assumptions
    (tensor,) = [text for text in found.assumptions if text.startswith("the input time is fixed to a tensor")]
    assert in_words(TIME) in tensor
    assert in_words(TIME) != in_words(TIME + 1)
    assert not any("fixed" in text for text in gramcert.audit(nn.Linear(4, 3), (4,)).assumptions)


def test_words_tell_zeros_apart():
    assert in_words(torch.zeros(2)) == "0.0 (float32, 2)"
    assert in_words(-torch.zeros(2)) == "-0.0 (float32, 2)"
    assert in_words(torch.tensor([0.0, -0.0])).startswith("a tensor (float32, 2, sha256 ")
    assert in_words(torch.tensor(7, dtype=torch.uint16)) == "7 (uint16, a scalar)"


INPUTS = r"it takes x \(float32, 1×4\), label \(int64, 1\), time \(float32, 1×2\)"


@pytest.mark.parametrize("name", ["conditioned.pt2", "conditioned.onnx"])
@pytest.mark.parametrize(
    ("fix", "problem"),
    [
        ({"lable": 1}, "fix: it has no input 'lable'; "),
        ({"label": 1}, "expected all inputs but one to be fixed, got 2 that are not; "),
        (FIX | {"x": 0.0}, "expected all inputs but one to be fixed, got 0 that are not; "),
        (FIX | {"label": 1.5}, "label: expected int64, got 1.5; "),
        (FIX | {"label": True}, "label: expected int64, got True; "),
        (FIX | {"label": 2**63}, f"label: expected int64, got {2**63}; "),
        (FIX | {"label": torch.tensor([1.0])}, "label: expected int64, got numbers of float32 that it does not have; "),
        (FIX | {"label": torch.tensor([1, 2])}, "label: expected the shape 1, got 2; "),
        (FIX | {"time": torch.tensor([[0.1, 1.0]]).double() / 3}, "expected float32, got numbers of float64 that it "),
        (FIX | {"time": 1e39}, r"time: expected float32, got 1e\+39; "),
        (FIX | {"time": 10**400}, "time: expected float32, got 10000"),
        (FIX | {"time": True}, "time: expected float32, got True; "),
    ],
)
def test_what_a_file_does_not_take_is_an_error_that_lists_its_inputs(files, name, fix, problem):
    with pytest.raises(ValueError, match=f"(?s)^{name}: fix: .*{problem.removeprefix('fix: ')}.*{INPUTS}"):
        gramcert.audit(files / name, (4,), fix=fix)


@pytest.mark.parametrize(
    ("fix", "error", "problem"),
    [
        ({"mask": 1}, ValueError, r"Conditioned has no input 'mask'; its forward takes x, label, time, scale"),
        (
            {"label": LABEL},
            ValueError,
            "expected all inputs but one to be fixed .*, got x, time that are not; its forw",
        ),
        ({}, ValueError, "expected all inputs but one to be fixed .*, got x, label, time that are not"),
        (FIX | {"label": LABEL[None, None]}, None, ""),
        (
            FIX | {"time": torch.zeros(1, 3)},
            ValueError,
            r"cannot take an input of shape .* with label = 2 \(int64, 1\), time = 0.0 .*: mat1",
        ),
        (FIX | {"time": "1"}, TypeError, r"audit\(fix\['time'\]\): expected a number or a tensor, got '1'"),
        (FIX | {"time": math.nan}, ValueError, r"expected a finite number, got nan"),
        (FIX | {"time": torch.tensor([[math.inf, 0]])}, ValueError, r"expected finite numbers"),
        (FIX | {"time": TIME + 0j}, TypeError, r"expected a dense tensor of real numbers"),
        ([1], TypeError, r"expected values by the names of inputs, got \[1\]"),
    ],
)
def test_what_a_module_does_not_take_is_an_error(fix, error, problem):
    if error is None:  # a shape that torch broadcasts is one that the module takes
        assert math.isfinite(gramcert.audit(conditioned(), (4,), fix=fix).upper)
        return
    with pytest.raises(error, match=problem):
        gramcert.audit(conditioned(), (4,), fix=fix)


def test_without_fixing_several_inputs_are_unbounded_and_the_reason_lists_them(files):
    for name in ("conditioned.pt2", "conditioned.onnx"):
        (reason,) = gramcert.audit(files / name, (4,)).reasons
        assert "it takes 3 inputs, x (float32, 1×4), label (int64, 1), time (float32, 1×2), and a constant" in reason
        assert reason.endswith('fix the others (fix={"name": value}, or --fix NAME=VALUE)')
        with pytest.raises(ValueError, match="it takes 3 inputs, x"):  # of which the shape is not asked for
            gramcert.audit(files / name)


def test_any_input_can_be_the_one_that_remains(files):
    """The network of the time has a constant too, by layer normalisation: finite."""
    fix = {"x": torch.ones(1, 4), "label": 2}
    one, two = (gramcert.audit(files / f"conditioned.{kind}", fix=fix).upper for kind in ("pt2", "onnx"))
    live = gramcert.audit(conditioned(), (2,), fix=fix | {"label": LABEL}).upper
    assert math.isfinite(live)
    assert one == pytest.approx(live, rel=TOL)
    assert two == pytest.approx(live, rel=TOL)
    model = conditioned()
    for time in torch.randn(20, 2, generator=torch.Generator().manual_seed(0)):
        jacobian = torch.func.jacrev(lambda t: model(torch.ones(1, 4), LABEL, t))(time[None]).reshape(3, 2)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= live


def test_open_sizes_are_filled_by_tensors_only(tmp_path):
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2)
    shapes = {"x": {0: batch}, "mask": {0: batch, 1: length}}

    class Scaled(nn.Module):
        def forward(self, x, mask):
            return x * mask.sum(1, keepdim=True)

    exported = torch.export.export(Scaled(), (torch.zeros(3, 4), torch.zeros(3, 5)), dynamic_shapes=shapes)
    torch.export.save(exported, tmp_path / "open.pt2")
    with pytest.raises(ValueError, match=r"mask: a number cannot fill a shape .* leaves open.*mask \(float32, \?×\?\)"):
        gramcert.audit(tmp_path / "open.pt2", (4,), fix={"mask": 1.0})
    found = gramcert.audit(tmp_path / "open.pt2", (4,), fix={"mask": torch.ones(1, 7)})
    assert 7 <= found.upper <= 7 * (1 + torch.finfo(torch.float32).eps)


def test_a_model_that_overwrites_a_fixed_input_is_unbounded():
    class Overwriting(nn.Module):
        def forward(self, x, state):
            state.add_(x)
            return state

    assert gramcert.audit(Overwriting(), (4,), fix={"state": torch.ones(1, 4)}).upper == math.inf


def test_the_command_fixes_and_verifies(files, tmp_path):
    np.save(tmp_path / "time.npy", TIME.numpy())
    model, certificate = str(files / "conditioned.onnx"), str(tmp_path / "certificate.json")
    fix = ["--fix", "label=2", "--fix", f"time={tmp_path / 'time.npy'}"]
    runner = CliRunner()
    found = runner.invoke(app, ["audit", model, *fix, "--no-cache", "--certificate", certificate])
    assert found.exit_code == 0
    assert "the input label is fixed to 2 (int64, 1)." in found.output
    assert runner.invoke(app, ["verify", certificate, model, *fix]).exit_code == 0
    other = runner.invoke(app, ["verify", certificate, model, "--fix", "label=3", *fix[2:]])
    assert other.exit_code == 1
    assert "fix: the certificate is about" in other.output


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("label", "expected NAME=VALUE"),
        ("=2", "expected NAME=VALUE"),
        ("label=two", "expected a number, true, false or a file ending in .npy"),
        ("label=none.npy", "cannot be read"),
        ("label=inf", "expected a finite number, got inf"),
        ("other=2", "it has no input 'other'"),
    ],
)
def test_options_that_cannot_be_used_end_in_one_line(files, option, problem):
    found = CliRunner().invoke(app, ["audit", str(files / "conditioned.pt2"), "--fix", option, "--no-cache"])
    assert found.exit_code == 2
    assert found.output.startswith("error: ")
    assert problem in found.output


def test_objects_in_files_are_not_loaded(files, tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    option = f"time={tmp_path / 'objects.npy'}"
    found = CliRunner().invoke(app, ["audit", str(files / "conditioned.pt2"), "--fix", option, "--no-cache"])
    assert found.exit_code == 2
    assert "Python objects" in found.output
