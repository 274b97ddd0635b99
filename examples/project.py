"""Train a small network whose layers stay within norm 1 by projection: python examples/project.py (some seconds).

The weights are plain parameters. After every other step of the optimiser they are moved to about the nearest ones whose
norm, as stored, is proved to be at most 1; dividing by the norm would shrink every direction for the sake of one.
"""

import torch
from torch import nn

import gramcert

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(8, 8, 4, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 8 * 8, 2),
)
layers = [layer for layer in network if isinstance(layer, (nn.Conv2d, nn.Linear))]

# Horizontal against vertical stripes, in noise.
stripes = (torch.arange(16) % 4 < 2).float().expand(16, 16)
labels = torch.arange(128) % 2
images = torch.where(labels[:, None, None].bool(), stripes, stripes.T)[:, None] + 0.5 * torch.randn(128, 1, 16, 16)

optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
handle = gramcert.projection(optimizer, layers, every=2)
for _ in range(30):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
handle.remove()

accuracy = (network(images).argmax(1) == labels).float().mean()
print(f"accuracy {accuracy:.2f}")
print("norms", ", ".join(f"{gramcert.spectral_norm(layer, tol=1e-2).upper:.4f}" for layer in layers))
print(f"Lipschitz constant at most {gramcert.lipschitz_bound(network):.4f}")
