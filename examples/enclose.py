"""The certified gain of every layer of a model at the sizes it really sees: python examples/enclose.py."""

import torch
from torch import nn

import gramcert

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
    nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=4),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 8 * 8, 10),
)

# The sizes: from hooks during one forward pass.
sizes = {}
handles = [
    layer.register_forward_pre_hook(lambda layer, inputs: sizes.update({layer: tuple(inputs[0].shape[2:]) or None}))
    for layer in model
]
model(torch.zeros(1, 3, 16, 16))
for handle in handles:
    handle.remove()

constant = gramcert.Enclosure(1, 1)
for name, layer in model.named_children():
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        norm = gramcert.spectral_norm(layer, sizes[layer], tol=1e-4)
        constant = constant * norm
        print(f"{name}  {type(layer).__name__:8}{norm!s:24}{norm.method}")

# ReLU is 1-Lipschitz, so the product bounds the network. Rounded outward, it is still a guarantee.
print(f"\nLipschitz constant of the network: at most {constant.upper:.6g}")
