"""Train a 1-Lipschitz network on scikit-learn's digits and certify it: python examples/digits.py (under a minute).

Every layer is 1-Lipschitz by construction; how much, its weights as they are decide: `certify` takes the certified
constant of each. The margin of a prediction, less the rounding of the logits, divided by that constant and by the
distance of the two rows of the last layer, is a radius within which no perturbation changes the class.

`gramcert train digits --out DIR` and `gramcert certify DIR` do the same from the command line.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import gramcert
from gramcert.nn import NormalizedLinear, OffsetCrossEntropy, PadChannels, ScaledAvgPool, Shift, SLLConv2d, SLLLinear

EPOCHS, BATCH = 15, 64
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
train, test = order[:1400], order[1400:]

model = nn.Sequential(
    Shift([-float(images[train].mean())]),
    PadChannels(16),
    *(SLLConv2d(16, 32, 3, form="frequency", iterations=2) for _ in range(4)),
    ScaledAvgPool(2),
    nn.Flatten(),
    SLLLinear(256, 128),
    NormalizedLinear(256, 10),
)

loss = OffsetCrossEntropy(offset=0.5, temperature=0.1)  # margins that images of 64 pixels allow
steps = EPOCHS * -(-len(train) // BATCH)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.4)
for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train))].split(BATCH):
        optimizer.zero_grad()
        loss(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()

found = gramcert.certify(model, [(images[test], labels[test])], [radius / 255 for radius in (36, 72, 108, 255)])
print(f"Lipschitz constant {found.lipschitz:.8f}")
print(f"clean accuracy {found.clean:.3f}")
for radius, accuracy in found.certified.items():
    print(f"certified accuracy at {255 * radius:.0f}/255 {accuracy:.3f}")
