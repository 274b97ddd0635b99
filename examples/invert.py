"""An invertible residual network, there and back with a certified error: python examples/invert.py (some seconds).

Each block is x + 0.9·g(x) with g of two layers that are kept within norm 1, so its inverse is the fixed point of
x = y - 0.9·g(x). That it exists, how much it amplifies errors, and how near the computed one is, are all proved.
"""

import torch
from torch import nn

import gramcert
from gramcert.parametrizations import spectral_norm


class Block(nn.Module):
    """x + 0.9·g(x)."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Conv2d(channels, hidden, 3, padding=1))
        self.second = spectral_norm(nn.Conv2d(hidden, channels, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        return x + 0.9 * self.second(nn.functional.elu(self.first(x)))


torch.manual_seed(0)
network = nn.Sequential(nn.PixelUnshuffle(2), Block(4, 8), nn.LeakyReLU(0.5), Block(4, 8), Block(4, 8)).eval()
images = torch.rand(8, 1, 8, 8)
with torch.no_grad():
    codes = network(images)

print(f"Lipschitz constant at most {gramcert.lipschitz_bound(network, input_shape=(1, 8, 8)):.4f}")
found = gramcert.invert(network, codes, input_shape=(1, 8, 8))
print(f"that of the inverse at most {found.constant:.4f}")
print(f"certified error of the inverse at most {found.error.max():.1e}")
# The codes were rounded to float32, which the inverse amplifies.
print(f"distance from the images {(found.x - images).flatten(1).norm(dim=1).max():.1e}")
