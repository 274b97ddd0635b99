"""The convolutions of ResNets for images of 224×224, with random weights as PyTorch initialises them."""

import torch

from gramcert import Convolution

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


def convolutions(network):
    """(name, layer, input size), in the order of the network."""
    torch.manual_seed(0)
    yield "conv1", convolution(3, 64, 7, 2), 224
    inputs, size = 64, 56
    for stage, blocks in enumerate(BLOCKS[network]):
        width, stride = 64 * 2**stage, 1 if stage == 0 else 2
        outputs = width if network == "resnet18" else 4 * width
        for block in range(blocks):
            step = stride if block == 0 else 1
            name = f"layer{stage + 1}.{block}"
            if network == "resnet18":
                yield f"{name}.conv1", convolution(inputs, width, 3, step), size
                yield f"{name}.conv2", convolution(width, width, 3, 1), size // step
            else:
                yield f"{name}.conv1", convolution(inputs, width, 1, 1), size
                yield f"{name}.conv2", convolution(width, width, 3, step), size
                yield f"{name}.conv3", convolution(width, outputs, 1, 1), size // step
            if inputs != outputs or step != 1:
                yield f"{name}.downsample", convolution(inputs, outputs, 1, step), size
            inputs, size = outputs, size // step


def convolution(inputs, outputs, size, stride):
    weight = torch.empty(outputs, inputs, size, size)
    torch.nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
    return Convolution(weight, stride, size // 2)
