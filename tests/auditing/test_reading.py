"""The same model from memory and from files of every kind, and files that cannot be audited."""

import copy
import math
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import Function, expect, residual_network
from gramcert import nn as gnn
from gramcert.auditing.architectures import ARCHITECTURES, CifarResNet, Denoiser, build
from gramcert.auditing.whole import matched
from gramcert.baselines import reshaped_kernel_norm
from real_layers import MODELS
from reference import sigma

SHAPE = (3, 8, 8)
ROUNDING = 100 * torch.finfo(torch.float32).eps  # of weights as they are deployed

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One network in every kind of file."""
    folder = tmp_path_factory.mktemp("models")
    model, example = residual_network(), torch.zeros(1, *SHAPE)
    exported = torch.export.export(model, (example,))
    torch.export.save(exported, folder / "model.pt2")
    torch.export.save(exported.run_decompositions(), folder / "decomposed.pt2")
    dynamic = torch.export.export(model, (torch.zeros(2, *SHAPE),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(dynamic, folder / "dynamic.pt2")
    program = torch.onnx.export(model, (example,), dynamo=True, optimize=False, verbose=False)
    program.save(folder / "model.onnx", external_data=False)
    program.save(folder / "external.onnx", external_data=True)
    return folder


@pytest.fixture(scope="module")
def expected():
    """The constant of that network in memory."""
    found = gramcert.audit(residual_network(), SHAPE, search_seconds=0)
    assert math.isfinite(found.upper)
    return found.product


@pytest.mark.parametrize("name", ["model.pt2", "decomposed.pt2", "dynamic.pt2", "model.onnx", "external.onnx"])
def test_files_have_the_constant_of_the_module(files, expected, name):
    found = gramcert.audit(files / name, SHAPE)
    assert found.reasons == ()
    assert found.product == pytest.approx(expected, rel=1e-9)
    assert found.upper < found.product
    assert gramcert.verify(found.certificate, files / name).holds


def test_a_certificate_of_one_file_is_not_one_of_another(files):
    found = gramcert.audit(files / "model.pt2", SHAPE)
    torch.export.save(torch.export.export(residual_network(1), (torch.zeros(1, *SHAPE),)), files / "other.pt2")
    other = gramcert.verify(found.certificate, files / "other.pt2")
    assert not other.holds
    assert any("its weights are not those of the certificate" in problem for problem in other.problems)


@pytest.mark.parametrize(
    ("shape", "message"), [((3, 8), r"its input x has the shape 1,3,8,8, got 3,8"), ((3, 9, 8), r"got 3,9,8")]
)
def test_other_shapes_than_the_file_has_are_refused(files, shape, message):
    with pytest.raises(ValueError, match=message):
        gramcert.audit(files / "model.pt2", shape)


def test_open_sizes_are_filled_in():
    assert matched("x", (None, 3, None), (3, 5)) == (1, 3, 5)
    assert matched("x", (4, 3), (3,)) == (4, 3)
    assert matched("x", (3, 5), (3, 5)) == (3, 5)


def test_layers_of_this_package_are_audited_as_their_plain_copies():
    torch.manual_seed(0)
    model = nn.Sequential(
        gnn.SRConv2d(3, 8, 3, padding=1), gnn.MaxMin(), gnn.ScaledAvgPool(2), nn.Flatten(), gnn.NormalizedLinear(128, 5)
    ).eval()
    head = float(sigma(model[4].weight.detach().double()))  # all before has the constant 1
    for audited in (model, gnn.export(model)):
        found = gramcert.audit(audited, SHAPE)
        assert head <= found.upper * (1 + ROUNDING)
        assert found.upper <= head * (1 + 2e-3)
        assert [row.kind for row in found.rows] == ["convolution", "matrix"]


@pytest.mark.parametrize(
    "function",
    [lambda x: (x * 7).chunk(1, 1)[0], lambda x: x.split(4, 1)[0] * 7, lambda x: (7 * x).unbind(0)[0]],
)
def test_lists_of_one_part_are_followed_in_files_too(function, tmp_path):
    torch.export.save(torch.export.export(Function(function), (torch.randn(1, 4),)), tmp_path / "model.pt2")
    for model in (Function(function), tmp_path / "model.pt2"):
        expect(gramcert.audit(model, (4,)), 7.0)


@pytest.mark.parametrize("layer", [gnn.SLLLinear(4, 4), gnn.MaxMin()])
@pytest.mark.parametrize("change", ["hook", "pre-hook", "forward"])
def test_hooks_and_changed_layers_of_this_package_are_not_overlooked(layer, change):
    layer = copy.deepcopy(layer).eval()
    if change == "hook":
        layer.register_forward_hook(lambda module, inputs, output: 10 * output)
    elif change == "pre-hook":
        layer.register_forward_pre_hook(lambda module, inputs: (10 * inputs[0],))
    else:
        layer.forward = lambda x: 10 * x
    # A residual layer with hooks is not exported as its plain form, and what it computes of its weights is not known.
    is_followed = change == "forward" or isinstance(layer, gnn.MaxMin)
    for model in (layer, nn.Sequential(layer)):
        expect(gramcert.audit(model, (4,)), 10.0 if is_followed else "weights go into .* that is not followed")
        exported, x = gnn.export(model), torch.randn(1, 4)
        assert torch.allclose(exported(x), model(x))


# Weights with a named architecture


@pytest.mark.parametrize("name", ["resnet20", "dncnn", "kw-small", "2c2f"])
def test_weights_with_a_name_are_the_module(name, tmp_path):
    torch.manual_seed(0)
    model, shape = {
        "resnet20": (CifarResNet(3), (3, 16, 16)),
        "dncnn": (Denoiser(1, 4, 3), (1, 8, 8)),
        "kw-small": (_two_and_two(4, 2, 1, 32), (1, 8, 8)),
        "2c2f": (_two_and_two(3, 1, 0, 128), (1, 8, 8)),
    }[name]
    torch.save({"epoch": 3, "state_dict": nn.DataParallel(model).state_dict()}, tmp_path / "weights.pth")
    # The cache knows maps by their digest: of other weights, the second audit would measure other norms.
    options = {"tol": 0.1, "cache": tmp_path / "cache", "search_seconds": 0}
    found = gramcert.audit(tmp_path / "weights.pth", shape, architecture=name, **options)
    again = gramcert.audit(model.eval(), shape, **options)
    assert found.product == again.product
    assert again.upper <= found.upper * (1 + 1e-9)  # the search goes on
    assert all(row.cached for row in again.rows if row.lower)
    assert math.isfinite(found.upper)


def _two_and_two(taps, stride, padding, features):
    return nn.Sequential(
        nn.Conv2d(1, 4, taps, stride, padding),
        nn.ReLU(),
        nn.Conv2d(4, 8, taps, stride, padding),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def test_weights_without_a_fitting_architecture_are_refused(tmp_path):
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="nothing about the order of the layers; name their architecture"):
        gramcert.audit(tmp_path / "weights.pth", (3,))
    with pytest.raises(ValueError, match=r"weights.pth: architecture 'resnet20': the weights do not fit"):
        gramcert.audit(tmp_path / "weights.pth", (3,), architecture="resnet20")
    with pytest.raises(ValueError, match="expected one of resnet20"):
        gramcert.audit(tmp_path / "weights.pth", (3,), architecture="vgg")
    with pytest.raises(ValueError, match="no weight has the prefix 'net'"):
        gramcert.audit(tmp_path / "weights.pth", (3,), architecture="resnet20", prefix="net")
    for name in ARCHITECTURES:
        with pytest.raises(ValueError, match="do not fit"):
            build(name, {"x": torch.zeros(1)})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.h5", b"x", "expected a file ending in .onnx"),
        ("model.onnx", b"", "the file is empty"),
        ("model.onnx", b"\xff\xfe not a model", "model.onnx"),
        ("model.pt2", b"PK not an archive", "model.pt2"),
        ("model.pth", b"\x80\x04garbage", "torch refused to load it"),
        ("model.safetensors", b"\xff" * 64, "model.safetensors: cannot be read"),
    ],
)
def test_files_that_are_no_models_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        gramcert.audit(tmp_path / name, (3,))
    with pytest.raises(ValueError, match="no such file"):
        gramcert.audit(tmp_path / "missing.onnx", (3,))
    with pytest.raises(TypeError, match=r"audit\(model\): expected a torch.nn.Module or a file, got int"):
        gramcert.audit(3, (3,))


def test_reading_needs_no_extra(tmp_path):
    """A .pt2 is audited where neither onnx nor safetensors nor flint is installed."""
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.zeros(1, 3),)), tmp_path / "model.pt2")
    code = (
        "import sys\n"
        "for name in ('onnx', 'safetensors', 'flint', 'matplotlib'): sys.modules[name] = None\n"
        "import gramcert\n"
        f"found = gramcert.audit({str(tmp_path / 'model.pt2')!r}, (3,))\n"
        f"print(gramcert.verify(found.certificate, {str(tmp_path / 'model.pt2')!r}).holds)\n"
        "try: gramcert.audit('x.onnx', (3,))\n"
        "except ValueError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.stdout.splitlines()[0] == "True", result.stderr


# Real models

REAL = {
    "auto_lirpa/cifar_2c2f.pth": ((3, 32, 32), {"architecture": "2c2f"}),
    "auto_lirpa/kw_mnist.pth": ((1, 28, 28), {"architecture": "kw-small"}),
    "convex_adversarial/models__fashion_mnist.pth": ((1, 28, 28), {"architecture": "kw-small"}),
    "convex_adversarial/models_scaled_l2__cifar_small_36px.pth": (
        (3, 32, 32),
        {"architecture": "kw-small", "prefix": "state_dict.0."},
    ),
    "dncnn/dncnn_25.pth": ((1, 40, 40), {"architecture": "dncnn"}),
    "yunet/yunet_n_320_320.onnx": ((3, 320, 320), {}),
}
REASONS = {
    "ultralight_face/version-RFB-320.onnx": ((3, 240, 320), "exp: its slope e\\^x is unbounded"),
    "gtcrn/gtcrn.onnx": ((257, 1, 2), "it takes 4 inputs"),
}
WEIGHTS_ALONE = (
    "blazeface/blazeface.pth",
    "brainchop/model5_gw_ae.safetensors",
    "brainchop/model21_104class.safetensors",
)

needs_models = pytest.mark.skipif(not MODELS.is_dir(), reason="the real models are not at hand")


@needs_models
@pytest.mark.parametrize("name", REAL)
def test_real_models_have_a_constant(name):
    shape, options = REAL[name]
    found = gramcert.audit(MODELS / name, shape, tol=0.1, search_seconds=0, **options)
    assert found.reasons == ()
    assert 1 < found.upper < math.inf


@needs_models
@pytest.mark.parametrize("name", REASONS)
def test_real_models_without_a_constant_say_why(name):
    shape, reason = REASONS[name]
    found = gramcert.audit(MODELS / name, shape, tol=0.5)
    assert found.upper == math.inf
    assert re.search(reason, " ".join(found.reasons))


@needs_models
@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_real_weights_alone_say_what_is_missing(name):
    with pytest.raises(ValueError, match="name their architecture"):
        gramcert.audit(MODELS / name, (3, 16, 16))


@needs_models
def test_resnet_20_is_tighter_than_the_product_without_folding():
    path = MODELS / "cifar_resnet" / "resnet20-12fca82f.th"
    found = gramcert.audit(path, (3, 32, 32), tol=5e-2, architecture="resnet20")
    assert sum(abs(row.share) for row in found.rows if row.share) == pytest.approx(1)
    model = build("resnet20", _state(path))
    apart, unsound = _unfolded(model)
    assert found.upper < apart
    # The norm of the reshaped kernel is below that of the convolution: its product proves nothing.
    layer = model.layer3[2].conv2
    assert float(reshaped_kernel_norm(layer.weight.detach())) < gramcert.spectral_norm(layer, 8).lower
    assert unsound < apart


def _state(path):
    content = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    return {name.removeprefix("module."): value for name, value in content.items()}


def _unfolded(model):
    """The product along the network of per-layer bounds, batch norm apart; by certified and by reshaped norms."""

    def norms(conv, bn, size):
        scale = float((bn.weight / (bn.running_var + bn.eps).sqrt()).abs().max().detach())
        certified = gramcert.spectral_norm(conv, size, tol=5e-2).lower  # from below, so that the comparison is fair
        return certified * scale, float(reshaped_kernel_norm(conv.weight.detach())) * scale

    sizes = [32, 32, 16, 8]
    totals = list(norms(model.conv1, model.bn1, 32))
    for stage, blocks in enumerate((model.layer1, model.layer2, model.layer3), 1):
        for number, block in enumerate(blocks):
            first = norms(block.conv1, block.bn1, sizes[stage - 1] if number == 0 else sizes[stage])
            second = norms(block.conv2, block.bn2, sizes[stage])
            totals = [total * (1 + one * two) for total, one, two in zip(totals, first, second, strict=True)]
    head = float(torch.linalg.matrix_norm(model.linear.weight.detach().double(), 2)) / 8
    return [total * head for total in totals]
