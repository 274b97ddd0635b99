"""Certify an ordinary CNN, trained as anybody would, around each image: python examples/certify.py (under a minute).

Nothing in this network was made to be robust. The product of the norms of its layers holds for all inputs at once, and
is far too careful for any one of them. `certify` puts a quadratic function below each margin around each image; where
that is positive, no change of the image gives another class.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import gramcert

EPOCHS, BATCH, COUNT = 12, 64, 200
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
train, test = order[:1400], order[1400 : 1400 + COUNT]

features = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.ReLU()]
features += [nn.Flatten(), nn.Linear(512, 64), nn.ReLU()]
model = nn.Sequential(*features, nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train))].split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
model.eval()

# What the product of norms certifies: margins divided by it and by the distance of two rows of the last layer.
product = gramcert.audit(model[:-1], (1, 8, 8), search_seconds=0).product
with torch.no_grad():
    logits, rows = model(images[test]), model[-1].weight
    top = logits.argmax(1)
    distances = torch.cdist(rows, rows)[top] * product
    radii = ((logits.amax(1, keepdim=True) - logits) / distances).scatter(1, top[:, None], float("inf")).amin(1)
radii = torch.where(top == labels[test], radii, 0)
radius = float(radii.sort(descending=True).values[COUNT // 4])

found = gramcert.certify(model, [(images[test], labels[test])], [radius])
share = float((radii > radius).double().mean())
print(f"clean accuracy {found.clean:.3f}")
print(f"at radius {radius:.3f} the product of norms, {product:.3g}, certifies {share:.3f}")
print(f"certify certifies {found.certified[radius]:.3f}")
