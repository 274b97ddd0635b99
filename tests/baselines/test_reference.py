"""The reference against the values that published tools get wrong, and its three routes against each other."""

import pytest
import torch

from gramcert import Convolution
from gramcert.baselines import reference_norm

DIGITS = 5e-6  # the table has five or more decimals


def ones(*size):
    return torch.ones(1, 1, *size, dtype=torch.float64)


E = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
MEANS = torch.full((8, 1, 3, 3), 0.5 / 9, dtype=torch.float64)

TABLE = [
    (Convolution(ones(3, 1), padding="same"), 16, 2.96595),
    (Convolution(ones(5, 1), padding="same"), 16, 4.84137),
    (Convolution(ones(5, 3), padding="same"), 16, 14.35923),
    (Convolution(ones(3, 3), padding="same", padding_mode="circular"), 2, 9),
    (Convolution(torch.outer(E, E)[None, None], padding="same", padding_mode="circular"), 6, 25 / 9),
    (Convolution(MEANS, padding=1, groups=8), 8, 0.46060),
    (Convolution(ones(2, 2), stride=2, dilation=2), 16, 3.84776),
    (Convolution(ones(2, 2) / 4, padding=1, padding_mode="circular"), 8, 1.33360),
    (Convolution(ones(1, 1), padding=1, padding_mode="circular"), 8, 2),
    (Convolution(ones(3), stride=2, padding=1, padding_mode="circular"), 3, 2.44949),
    (Convolution(ones(3), stride=2, padding=1, padding_mode="circular"), 13, 2.34874),
    (Convolution(ones(3), dilation=2, padding=1), 7, 2.41421),
    (Convolution(ones(3), stride=3, dilation=2, padding=3), 5, 1.73205),
    (Convolution(ones(3, 3), padding=1, padding_mode="reflect"), 8, 9.53455),
    (Convolution(torch.tensor([[[1.0], [-1.0]]])), 4, 1.41421),
]


@pytest.mark.parametrize(("layer", "size", "true"), TABLE)
def test_values_that_published_tools_get_wrong(layer, size, true):
    assert abs(reference_norm(layer, size) - true) <= DIGITS


def test_lanczos_agrees_with_the_dense_svd(monkeypatch, generator):
    layers = [
        Convolution(torch.randn(3, 2, 3, 3, generator=generator), padding="same"),
        Convolution(torch.randn(2, 4, 3, 2, generator=generator), stride=2, padding=1, padding_mode="reflect"),
        Convolution(torch.randn(4, 2, 3, 3, generator=generator), stride=2, transposed=True, output_padding=1),
    ]
    for layer in layers:
        dense = reference_norm(layer, 9)
        with monkeypatch.context() as patch:
            patch.setattr("gramcert.baselines.reference.DENSE_SIDE", 0)
            lanczos = reference_norm(layer, 9)
        assert lanczos == pytest.approx(dense, rel=64 * torch.finfo(torch.float64).eps)


def test_circular_layers_in_groups_agree_with_the_dense_svd(generator):
    kernel = torch.randn(4, 1, 3, 5, generator=generator, dtype=torch.float64)
    layer = Convolution(kernel, padding="same", padding_mode="circular", groups=2)
    dense = torch.linalg.matrix_norm(layer.to_dense((4, 3)), ord=2).item()
    assert reference_norm(layer, (4, 3)) == pytest.approx(dense, rel=64 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("size", [4, 40])
@pytest.mark.parametrize("mode", ["zeros", "circular", "replicate"])
def test_zero_kernel_has_norm_zero(mode, size):
    assert reference_norm(Convolution(torch.zeros(2, 2, 3, 3), padding="same", padding_mode=mode), size) == 0


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_does_not_matter(factor, generator):
    kernel = torch.randn(2, 2, 3, generator=generator)
    scaled = reference_norm(Convolution(kernel * factor), 8) / factor
    assert scaled == pytest.approx(reference_norm(Convolution(kernel), 8), rel=8 * torch.finfo(torch.float32).eps)


def test_modules_are_described_by_themselves():
    layer = torch.nn.Conv1d(2, 3, 3, stride=2, padding=1)
    assert reference_norm(layer, 8) == reference_norm(Convolution.of(layer), 8)
