"""The convolutions of real trained networks, where their files are at hand."""

import re
from pathlib import Path

import torch

from gramcert import Convolution

MODELS = Path(__file__).parent.parent.parent / "shared" / "models"

# Strides that a file of weights does not tell: file, name of the weight, stride; the padding keeps the size
# or, with stride 2, halves it.
STRIDES = (
    ("cifar_resnet/*.th", r"layer[23]\.0\.conv1", 2),
    ("convex_adversarial/*.pth", r".*", 2),
    ("auto_lirpa/kw_mnist.pth", r".*", 2),
    ("blazeface/*.pth", r"backbone1\.0\.weight|backbone1\.(4|7)\.convs\.0|backbone2\.0\.convs\.0", 2),
)


def real_layers():
    """(file, name, Convolution) of every convolution in the files."""
    for path in sorted(MODELS.glob("*/*")):
        file = path.relative_to(MODELS).as_posix()
        if path.suffix in (".pth", ".th"):
            yield from _of_tensors(file, torch.load(path, weights_only=True, map_location="cpu"))
        elif path.suffix == ".safetensors":
            from safetensors.torch import load_file

            yield from _of_tensors(file, load_file(path))
        elif path.suffix == ".onnx":
            yield from _of_onnx(file, path)


def _of_tensors(file, content, prefix=""):
    if isinstance(content, torch.Tensor):
        name = prefix.removeprefix("state_dict.").removeprefix("module.")
        if content.dim() >= 3 and not name.startswith("optimizer"):
            yield file, name, _layer(file, name, content)
    elif isinstance(content, (dict, list, tuple)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            yield from _of_tensors(file, value, f"{prefix}.{key}" if prefix else str(key))


def _layer(file, name, kernel):
    matching = (s for pattern, names, s in STRIDES if Path(file).match(pattern) and re.search(names, name))
    stride = next(matching, 1)
    depthwise = kernel.shape[1] == 1 and kernel.shape[0] > 1 and "convs.0" in name
    padding = [(k - stride + 1) // 2 for k in kernel.shape[2:]]
    return Convolution(kernel, stride, [max(0, p) for p in padding], groups=kernel.shape[0] if depthwise else 1)


def _of_onnx(file, path):
    import onnx

    graph = onnx.load(path).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose") or node.input[1] not in weights:
            continue
        kernel = torch.from_numpy(onnx.numpy_helper.to_array(weights[node.input[1]]).copy()).float()
        options = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        axes = kernel.dim() - 2
        pads = options.get("pads", [0] * 2 * axes)
        yield (
            file,
            node.input[1],
            Convolution(
                kernel,
                list(options.get("strides", [1] * axes)),
                list(zip(pads[:axes], pads[axes:], strict=True)),
                "zeros",
                list(options.get("dilations", [1] * axes)),
                options.get("group", 1),
                node.op_type == "ConvTranspose",
                list(options.get("output_padding", [0] * axes)),
            ),
        )
