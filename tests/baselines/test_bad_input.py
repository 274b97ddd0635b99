import pytest
import torch

from gramcert import Convolution
from gramcert.baselines import (
    four_reshapes,
    frequency_svd,
    power_iteration,
    reference_norm,
    reshaped_kernel_norm,
    sampled_density,
    tensor_norm,
)

ON_KERNELS = {
    "frequency_svd": lambda kernel: frequency_svd(kernel, 4),
    "reshaped_kernel_norm": reshaped_kernel_norm,
    "four_reshapes": four_reshapes,
    "sampled_density": sampled_density,
    "tensor_norm": tensor_norm,
}
ON_LAYERS = {"power_iteration": power_iteration, "reference_norm": reference_norm}
KERNEL = torch.ones(1, 1, 3)


@pytest.mark.parametrize("name", ON_KERNELS)
def test_kernels(name):
    method = ON_KERNELS[name]
    with pytest.raises(TypeError, match=rf"{name}\(kernel\): expected a torch.Tensor, got list"):
        method([1.0])
    with pytest.raises(TypeError, match=rf"{name}\(kernel\): expected a real float32 or float64 kernel"):
        method(KERNEL.to(torch.complex64))
    with pytest.raises(ValueError, match=rf"{name}\(kernel\): expected shape .* got shape \(3, 3\)"):
        method(torch.ones(3, 3))
    with pytest.raises(ValueError, match=rf"{name}\(kernel\): expected no empty dimension"):
        method(torch.ones(1, 0, 3))
    for value in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=rf"{name}\(kernel\): expected finite values, got 1"):
            method(torch.tensor([[[1.0, value]]]))


@pytest.mark.parametrize("name", ON_LAYERS)
def test_layers(name):
    method = ON_LAYERS[name]
    with pytest.raises(TypeError, match=rf"^{name}\(Linear\)"):
        method(torch.nn.Linear(2, 2), 4)
    with pytest.raises(ValueError, match=rf"{name}\(kernel\): expected finite values"):
        method(Convolution(KERNEL * torch.nan), 4)
    with pytest.raises(ValueError, match=rf"{name}\(input_size=\(4, 4\)\): the kernel needs 1 sizes, got 2"):
        method(Convolution(KERNEL), (4, 4))
    with pytest.raises(ValueError, match="the output would be empty"):
        method(Convolution(KERNEL), 2)


def test_sizes():
    with pytest.raises(ValueError, match=r"frequency_svd\(input_size=\(0,\)\): expected sizes of at least 1"):
        frequency_svd(KERNEL, 0)
    with pytest.raises(TypeError, match=r"frequency_svd\(input_size\): expected"):
        frequency_svd(KERNEL, 4.0)
    with pytest.raises(
        ValueError, match=r"sampled_density\(samples=\(2,\)\): expected at least the kernel size \(3,\)"
    ):
        sampled_density(KERNEL, 2)


def test_counts():
    with pytest.raises(ValueError, match=r"power_iteration\(iterations=-1\): expected at least 0"):
        power_iteration(Convolution(KERNEL), 4, -1)
    with pytest.raises(ValueError, match=r"tensor_norm\(iterations=0\): expected at least 1"):
        tensor_norm(KERNEL, 0)
    with pytest.raises(ValueError, match=r"tensor_norm\(starts=\(0,\)\): expected"):
        tensor_norm(KERNEL, starts=0)
    with pytest.raises(TypeError, match=r"tensor_norm\(iterations\): expected an int, got float"):
        tensor_norm(KERNEL, 1.5)
