"""What an audit costs, cold and from its cache, against verifying it: python benchmarks/auditing.py [WEIGHTS].

WEIGHTS is a state dict of the CIFAR ResNet-20 of architecture ``resnet20``; without it random weights are used.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

import gramcert
from gramcert.auditing.architectures import CifarResNet, build
from gramcert.baselines import reshaped_kernel_norm
from gramcert.files import read_torch

SHAPE, TOL = (3, 32, 32), 1e-2


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    model = CifarResNet(3).eval()
    if len(sys.argv) > 1:
        tensors = read_torch(Path(sys.argv[1]))
        names = {name.removeprefix("state_dict.").removeprefix("module."): name for name in tensors}
        known = model.state_dict()
        model = build("resnet20", {short: tensors[name] for short, name in names.items() if short in known})
    gramcert.audit(torch.nn.Linear(2, 2), (2,))  # torch.export takes seconds to import
    example = torch.zeros(1, *SHAPE)
    torch.export.save(torch.export.export(model, (example,)), folder / "model.pt2")
    options = {"dynamo": True, "optimize": False, "verbose": False, "external_data": False}
    torch.onnx.export(model, (example,), folder / "model.onnx", **options)
    print(f"ResNet-20 at 32×32, tol {TOL:g}, {torch.get_num_threads()} threads")
    cold, audit = timed(lambda: gramcert.audit(model, SHAPE, tol=TOL, cache=folder / "cache"))
    print(f"audit, cold                {cold:8.2f} s   L <= {audit.upper:.6g}")
    for name, source in (("module", model), (".pt2", folder / "model.pt2"), ("ONNX", folder / "model.onnx")):
        warm, again = timed(lambda source=source: gramcert.audit(source, SHAPE, tol=TOL, cache=folder / "cache"))
        print(f"audit, cached, {name:12}{warm:8.2f} s   relative difference {again.upper / audit.upper - 1:.1e}")
    two, _ = timed(lambda: gramcert.audit(model, SHAPE, tol=TOL, jobs=2))
    print(f"audit, cold, two processes {two:8.2f} s")
    checked, found = timed(lambda: gramcert.verify(audit.certificate, model))
    print(f"verify                     {checked:8.2f} s   {checked / cold:.2f} × audit, holds: {found.holds}")
    for name, norm in (
        ("unfolded, certified", lambda layer, size: gramcert.spectral_norm(layer, size, tol=TOL).upper),
        ("unfolded, reshaped kernels", lambda layer, size: float(reshaped_kernel_norm(layer.weight.detach()))),
    ):
        print(f"{name:27}product {unfolded(model, norm):.6g}: {unfolded(model, norm) / audit.upper:.3g} × the audit's")


def unfolded(model, norm):
    """The product along the network with batch normalisation measured apart from its convolution."""

    def pair(conv, bn, size):
        return norm(conv, size) * float((bn.weight / (bn.running_var + bn.eps).sqrt()).abs().max().detach())

    total = pair(model.conv1, model.bn1, 32)
    size = 32
    for stage in (model.layer1, model.layer2, model.layer3):
        for block in stage:
            inner = pair(block.conv1, block.bn1, size)
            size //= block.stride
            total *= 1 + inner * pair(block.conv2, block.bn2, size)
    return total * float(torch.linalg.matrix_norm(model.linear.weight.detach().double(), 2)) / size


def timed(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
