"""Small networks that several tests audit."""

import torch
from torch import nn


class Function(nn.Module):
    """A module of one function, with tensors that it may use as buffers."""

    def __init__(self, function, **tensors):
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.function(x, *self.buffers())


class Residual(nn.Module):
    """Convolutions with batch normalisation, a shortcut, pooling and a linear layer: a small ResNet."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(x + self.bn2(self.conv2(x)))
        return self.linear(x.mean((2, 3)))


def residual_network(seed=0):
    """With statistics of a network that was trained."""
    torch.manual_seed(seed)
    model = Residual()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.weight.uniform_(0.5, 2)
                part.bias.normal_()
                part.running_mean.normal_()
                part.running_var.uniform_(0.2, 2)
    return model.eval()
