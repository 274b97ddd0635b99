"""The certified constant of a whole model, its certificate, and what has no constant: python examples/audit.py."""

import torch
from torch import nn

import gramcert


class Block(nn.Module):
    """A residual block; with a gate it multiplies two values that both depend on the input."""

    def __init__(self, channels, gated=False):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.gated = gated

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return x + (y * torch.sigmoid(x) if self.gated else y)


def network(gated):
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), Block(8, gated), *head).eval()


model = network(gated=False)
audit = gramcert.audit(model, (3, 16, 16))
print(f"L = {audit.upper:.4f}")
print(f"the certificate holds: {gramcert.verify(audit.certificate, model).holds}")
print(f"with a gate: {gramcert.audit(network(gated=True), (3, 16, 16)).reasons[0]}")
