import pytest
import torch

from gramcert import spectral_norm
from gramcert.baselines import reference_norm
from real_layers import MODELS, real_layers

if not MODELS.is_dir():
    pytest.skip("the trained weights are not at hand", allow_module_level=True)
pytest.importorskip("onnx", reason="some of the weights are in ONNX files")

LAYERS = list(real_layers())


def test_every_convolution_is_enclosed_for_every_size():
    assert len(LAYERS) > 100
    for file, name, layer in LAYERS:
        norm = spectral_norm(layer, tol=1e-3)
        assert norm.tol_reached, (file, name, norm.explain())
        assert norm.relative_width <= 1e-3


@pytest.mark.parametrize("index", range(0, len(LAYERS), 9))
def test_one_size_against_lanczos(index):
    _, _, layer = LAYERS[index]
    size = (60, 12, 5)[layer.axes - 1]
    norm = spectral_norm(layer, size, tol=1e-4)
    reference = reference_norm(layer, size)
    assert norm.tol_reached
    assert reference * (1 - 1e-9) <= norm.upper
    assert norm.lower <= reference * (1 + 100 * torch.finfo(torch.float64).eps)
