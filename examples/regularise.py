"""Keep the gain of every convolution of a small network below 1 while it learns: python examples/regularise.py.

The penalty is the excess of the bound at the layer's own geometry and input size, so at the end the product of the
bounds is an upper bound of the network's Lipschitz constant, in exact arithmetic (ReLU and flattening have constant 1).
"""

import torch
from torch import nn

import gramcert

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(8, 8, 4, stride=2, padding=1, padding_mode="circular"),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 8 * 8, 2),
)
SIZES = (16, 16, None)  # input sizes of the layers with weights


def bounds() -> torch.Tensor:
    layers = [layer for layer in network if isinstance(layer, (nn.Conv2d, nn.Linear))]
    return torch.stack([gramcert.norm2(layer, size) for layer, size in zip(layers, SIZES, strict=True)])


# Horizontal against vertical stripes, in noise.
stripes = (torch.arange(16) % 4 < 2).float().expand(16, 16)
labels = torch.arange(128) % 2
images = torch.where(labels[:, None, None].bool(), stripes, stripes.T)[:, None] + 0.5 * torch.randn(128, 1, 16, 16)

optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
for _ in range(80):
    loss = nn.functional.cross_entropy(network(images), labels)
    penalty = torch.relu(bounds() - 0.98).sum()
    optimizer.zero_grad()
    (loss + 10 * penalty).backward()
    optimizer.step()

with torch.no_grad():
    accuracy = (network(images).argmax(1) == labels).float().mean()
    print(f"accuracy {accuracy:.2f}")
    print("bounds", ", ".join(f"{bound:.3f}" for bound in bounds()))
    print(f"Lipschitz constant at most {bounds().prod():.3f}")
