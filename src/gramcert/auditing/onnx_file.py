"""ONNX files in our words, of which nothing is ever executed.

The ``onnx`` package parses the protobuf; everything else it can do is left alone, because its readers trust shapes and
paths. Here a tensor is only made after its shape was found to fit the bytes that are there, and weights in files of
their own are only read from inside of the model's folder.
"""

import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing.readable import shown_text
from gramcert.files import looks_like
from gramcert.operators.graph import BadModel

# Versions of the operators whose meaning is known: before 7 they broadcast in another way.
OLDEST_OPSET, NEWEST_OPSET = 7, 28

# Bytes of the file (more cannot be protobuf), of all tensors in other files, axes of a tensor, and the product of their
# sizes other than 0.
LARGEST_FILE, MOST_EXTERNAL, MOST_AXES, LARGEST_SIDE = 2**31, 2**33, 64, 2**40

# Names of the default domain.
DEFAULT = ("", "ai.onnx")

# By the codes of the format: the type, and the field that holds numbers where they are not raw bytes.
_TYPES = {
    1: (torch.float32, "float_data"),
    2: (torch.uint8, "int32_data"),
    3: (torch.int8, "int32_data"),
    4: (torch.uint16, "int32_data"),
    5: (torch.int16, "int32_data"),
    6: (torch.int32, "int32_data"),
    7: (torch.int64, "int64_data"),
    9: (torch.bool, "int32_data"),
    10: (torch.float16, "int32_data"),
    11: (torch.float64, "double_data"),
    12: (torch.uint32, "uint64_data"),
    13: (torch.uint64, "uint64_data"),
    16: (torch.bfloat16, "int32_data"),
}
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
DTYPES = {code: dtype for code, (dtype, _) in _TYPES.items()}

# Kinds of attributes: the field that holds them.
_FLOAT, _INT, _STRING, _TENSOR, _GRAPH, _FLOATS, _INTS, _STRINGS, _TENSORS, _GRAPHS = range(1, 11)
_PLAIN = {_FLOAT: "f", _INT: "i", _FLOATS: "floats", _INTS: "ints"}


@dataclass(frozen=True)
class OnnxNode:
    """One node of the file.

    Attributes:
        name: may be empty.
        op_type: such as ``Conv``.
        domain: empty for the operators of ONNX itself.
        inputs: names of values, empty where an optional one is left out.
        outputs: names of values, in the same way.
        attributes: numbers, texts, lists of them, and tensors.
        has_subgraph: whether it holds graphs of its own, which may use any value of this one.
        branches: of an ``If``, by the names of its attributes.
    """

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    has_subgraph: bool = False
    branches: dict[str, "OnnxBranch"] = field(default_factory=dict)


@dataclass(frozen=True)
class OnnxBranch:
    """A graph inside of a node, which may use every value that was made before that node.

    Attributes:
        nodes: what is done.
        tensors: initializers by name.
        outputs: names of the results.
    """

    nodes: list[OnnxNode]
    tensors: dict[str, Tensor]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxModel:
    """A model in the order of its execution.

    Attributes:
        inputs: names and shapes of what the caller passes, a size that the file leaves open being ``None``.
        types: of the inputs.
        nodes: what is done; each uses only what was made before.
        tensors: initializers by name.
        outputs: names of the results.
        opset: version of ONNX's own operators.
        shapes: that the file gives of values; only for people, and to go on behind what is not known.
    """

    inputs: dict[str, tuple[int | None, ...]]
    types: dict[str, torch.dtype]
    nodes: list[OnnxNode]
    tensors: dict[str, Tensor]
    outputs: tuple[str, ...]
    opset: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def read_onnx(path: Path) -> OnnxModel:
    """The model in an ONNX file.

    Raises:
        BadModel: the file is damaged, larger than it says, uses what is not known, or reaches out of its folder.
    """
    try:
        return _model(_parsed(path), _Tensors(path.parent))
    except BadModel as error:
        raise BadModel(f"{path}: {error}") from None
    except Exception as error:  # a damaged or hostile file can make a parser raise anything
        reason = shown_text((str(error).splitlines() or [""])[0])
        raise BadModel(f"{path}: cannot be read ({type(error).__name__}: {reason})") from error


def _parsed(path: Path) -> Any:
    try:
        import onnx
    except ImportError:
        raise BadModel("reading ONNX needs the extra: pip install 'gramcert[onnx]'") from None
    content = _read(path, 0, None, LARGEST_FILE)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception:  # a type of the protobuf package, which has changed its name
        raise BadModel(f"expected an ONNX model, got a truncated or other file{looks_like(content[:64])}") from None
    if not model.HasField("graph"):
        raise BadModel("expected an ONNX model, got one without a graph")
    return model


def _read(path: Path, offset: int, length: int | None, most: int) -> bytes:
    """Bytes of a regular file; opened without waiting, so that a pipe is noticed."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise BadModel(f"{_shown(path.name)} cannot be opened ({error.strerror})") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise BadModel(f"expected a regular file, got {_shown(path.name)}, which is none")
    with os.fdopen(handle, "rb") as stream:
        length = status.st_size - offset if length is None else length
        if length > most:
            raise BadModel(f"expected at most {most} bytes, got {length}")
        if not (offset >= 0 and length >= 0 and offset + length <= status.st_size):
            span = f"bytes {offset} to {offset + length}"
            raise BadModel(f"expected {span} of {_shown(path.name)}, which has {status.st_size}")
        stream.seek(offset)
        content = stream.read(length)
    if len(content) != length:
        raise BadModel(f"{_shown(path.name)} changed while it was read")
    return content


def _model(proto: Any, tensors: "_Tensors") -> OnnxModel:
    graph = proto.graph
    if graph.sparse_initializer:
        raise BadModel(f"expected dense tensors, got the sparse {_shown(graph.sparse_initializer[0].values.name)}")
    if graph.quantization_annotation:
        raise BadModel(f"{_shown(graph.quantization_annotation[0].tensor_name)} is a quantised tensor")
    _require_text(graph)
    if any(function.domain in DEFAULT for function in proto.functions):
        raise BadModel("it gives operators of ONNX a meaning of its own")
    values = _initializers(graph, tensors)
    given = [value for value in graph.input if value.name not in values]
    inputs = {value.name: _shape(value) for value in given}
    if len(inputs) != len(given) or "" in inputs:
        raise BadModel("expected inputs with names that differ")
    nodes = [_node(node, tensors) for node in graph.node]
    _require_order(nodes, values.keys() | inputs.keys(), [output.name for output in graph.output])
    types = {value.name: DTYPES[value.type.tensor_type.elem_type] for value in given}
    outputs = tuple(output.name for output in graph.output)
    return OnnxModel(inputs, types, nodes, values, outputs, _opset(proto), _told_shapes(graph))


def _told_shapes(graph: Any) -> dict[str, tuple[int, ...]]:
    """Of values whose sizes are all given."""
    shapes = dict[str, tuple[int, ...]]()
    for value in (*graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") == "tensor_type" and tensor.HasField("shape"):
            sizes = tuple(dim.dim_value for dim in tensor.shape.dim)
            if len(sizes) <= MOST_AXES and min(sizes, default=1) > 0:
                shapes[value.name] = sizes
    return shapes


def _initializers(graph: Any, tensors: "_Tensors") -> dict[str, Tensor]:
    values = dict[str, Tensor]()
    for tensor in graph.initializer:
        if not tensor.name or tensor.name in values:
            raise BadModel(f"expected names that differ, got the tensor {_shown(tensor.name)} twice")
        values[tensor.name] = tensors.of(tensor)
    return values


def _branch(graph: Any, tensors: "_Tensors") -> OnnxBranch:
    """One side of an ``If``; whether it uses what is there is known where it is followed."""
    if graph.input or graph.sparse_initializer or graph.quantization_annotation:
        raise BadModel("expected branches without inputs, and with dense tensors")
    _require_text(graph)
    nodes = [_node(node, tensors) for node in graph.node]
    return OnnxBranch(nodes, _initializers(graph, tensors), tuple(output.name for output in graph.output))


def _require_text(graph: Any) -> None:
    """Names that are no UTF-8 come out of the parser as bytes."""
    parts = (graph.initializer, graph.input, graph.output, graph.value_info)
    names = [value.name for part in parts for value in part]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, node.overload, *node.input, *node.output]
        names += [attribute.name for attribute in node.attribute]
    if not all(isinstance(name, str) for name in names):
        raise BadModel("expected names that are text, got bytes that are none")


def _opset(proto: Any) -> int:
    versions = {entry.version for entry in proto.opset_import if entry.domain in DEFAULT}
    if len(versions) != 1:
        raise BadModel(f"expected one version of ONNX's own operators, got {sorted(versions) or 'none'}")
    version = int(versions.pop())
    if not OLDEST_OPSET <= version <= NEWEST_OPSET:
        raise BadModel(f"expected operators of version {OLDEST_OPSET} to {NEWEST_OPSET}, got {version}")
    return version


def _shape(value: Any) -> tuple[int | None, ...]:
    """Sizes of an input; those without a positive number are open."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise BadModel(f"expected a tensor as the input {_shown(value.name)}, got {kind or 'no type'}")
    tensor = value.type.tensor_type
    if tensor.elem_type not in DTYPES:
        raise BadModel(f"the input {_shown(value.name)} has the unknown type {tensor.elem_type}")
    if not tensor.HasField("shape") or len(tensor.shape.dim) > MOST_AXES:
        raise BadModel(f"expected a shape for the input {_shown(value.name)}")
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)


def _node(node: Any, tensors: "_Tensors") -> OnnxNode:
    attributes, has_subgraph, branches = dict[str, Any](), False, dict[str, OnnxBranch]()
    for attribute in node.attribute:
        place = f"{_shown(attribute.name)} of {_shown(node.name or node.op_type)}"
        if attribute.name in attributes:
            raise BadModel(f"expected names that differ, got the attribute {place} twice")
        if attribute.ref_attr_name:
            raise BadModel(f"the attribute {place} refers to that of a function outside of one")
        has_subgraph |= attribute.type in (_GRAPH, _GRAPHS)
        attributes[attribute.name] = _attribute(attribute, place, tensors)
        if attribute.type == _GRAPH and node.op_type == "If":
            branches[attribute.name] = _branch(attribute.g, tensors)
    domain = "" if node.domain in DEFAULT and not node.overload else f"{node.domain}{node.overload}"
    names = (node.name, node.op_type, domain, tuple(node.input), tuple(node.output))
    return OnnxNode(*names, attributes, has_subgraph, branches)


def _attribute(attribute: Any, place: str, tensors: "_Tensors") -> Any:
    kind = attribute.type
    if kind in _PLAIN:
        value = getattr(attribute, _PLAIN[kind])
        return list(value) if kind in (_FLOATS, _INTS) else value
    if kind in (_STRING, _STRINGS):
        texts = [text.decode("utf-8", "replace") for text in (attribute.strings if kind == _STRINGS else [attribute.s])]
        return texts if kind == _STRINGS else texts[0]
    if kind in (_TENSOR, _TENSORS):
        found = [tensors.of(tensor) for tensor in (attribute.tensors if kind == _TENSORS else [attribute.t])]
        return found if kind == _TENSORS else found[0]
    if kind in (_GRAPH, _GRAPHS):
        return None  # its node is unbounded, unless it is an `If` with a known condition
    raise BadModel(f"the attribute {place} has the unknown kind {kind}")


def _require_order(nodes: list[OnnxNode], known: Iterable[str], outputs: list[str]) -> None:
    """Each value is made once, and before it is used: so there are no cycles."""
    made = set(known)
    for node in nodes:
        place = _shown(node.name or node.op_type)
        for name in node.inputs:
            if name and name not in made:
                raise BadModel(f"{place} uses {_shown(name)}, which is not made before it")
        for name in node.outputs:
            if name in made:
                raise BadModel(f"expected names that differ, got {_shown(name)} made again by {place}")
            made.update({name} - {""})
    for name in outputs:
        if name not in made:
            raise BadModel(f"the output {_shown(name)} is never made")
    if len(set(outputs)) != len(outputs) or not outputs:
        raise BadModel("expected outputs with names that differ")


class _Tensors:
    """Makes tensors, from the model's folder where their bytes are in other files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._external = 0

    def of(self, tensor: Any) -> Tensor:
        """One tensor, made only if its shape fits the bytes that are there."""
        name, shape = _shown(tensor.name), tuple(tensor.dims)
        if tensor.data_type not in _TYPES:
            raise BadModel(f"the tensor {name} has the unknown, quantised or text type {tensor.data_type}")
        if tensor.HasField("segment"):
            raise BadModel(f"the tensor {name} is a segment of another")
        if len(shape) > MOST_AXES or min(shape, default=0) < 0:
            raise BadModel(f"the tensor {name} has the shape {_shown(str(shape))}")
        dtype, field = _TYPES[tensor.data_type]
        count = math.prod(shape)
        expected = count * dtype.itemsize
        filled = [other for other in _FIELDS if len(getattr(tensor, other))]
        is_external = tensor.data_location == 1 or len(tensor.external_data) > 0
        if len(filled) + (len(tensor.raw_data) > 0) + is_external > 1 or filled not in ([], [field]):
            raise BadModel(f"the tensor {name} has its numbers in more than one place, or in the wrong one")
        if filled:
            return self._listed(getattr(tensor, field), dtype, count, name).reshape(shape)
        content = self._outside(tensor, expected) if is_external else tensor.raw_data
        if len(content) != expected:
            raise BadModel(f"the tensor {name} needs {expected} bytes for its shape, got {len(content)}")
        if math.prod(max(size, 1) for size in shape) > LARGEST_SIDE:
            raise BadModel(f"the tensor {name} has the shape {_shown(str(shape))}")
        return _of_bytes(content, dtype, name).reshape(shape)

    def _listed(self, values: Any, dtype: torch.dtype, count: int, name: str) -> Tensor:
        """From a list of numbers; those of 16 bits are lists of their bit patterns."""
        if len(values) != count:
            raise BadModel(f"the tensor {name} needs {count} numbers for its shape, got {len(values)}")
        if dtype in (torch.float16, torch.bfloat16):
            bits = torch.tensor(list(values), dtype=torch.int64)
            if int(bits.min()) < 0 or int(bits.max()) > 0xFFFF:
                raise BadModel(f"the tensor {name} has numbers that do not fit its type")
            return bits.to(torch.uint16).view(dtype)
        try:
            result = torch.tensor(list(values), dtype=dtype)
        except (RuntimeError, OverflowError, ValueError):
            raise BadModel(f"the tensor {name} has numbers that do not fit its type") from None
        if not dtype.is_floating_point and result.tolist() != list(values):
            raise BadModel(f"the tensor {name} has numbers that do not fit its type")
        return result

    def _outside(self, tensor: Any, expected: int) -> bytes:
        """From another file below the folder of the model, links included."""
        name = _shown(tensor.name)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if len(entries) != len(tensor.external_data) or not location:
            raise BadModel(f"the tensor {name} does not say where its bytes are")
        parts = PurePosixPath(location)
        if parts.is_absolute() or Path(location).is_absolute() or ".." in parts.parts or set(location) & set("\\\0:"):
            raise BadModel(f"the tensor {name} is to be read from {_shown(location)}, outside of the model's folder")
        try:
            path = (self._folder / location).resolve(strict=True)
        except (OSError, RuntimeError):
            raise BadModel(f"the tensor {name} is to be read from {_shown(location)}, which is not there") from None
        if not path.is_relative_to(self._folder):
            raise BadModel(f"the tensor {name} is to be read from {_shown(location)}, outside of the model's folder")
        offset, length = (_natural(entries.get(key), name, key) for key in ("offset", "length"))
        if length not in (None, expected):
            raise BadModel(f"the tensor {name} needs {expected} bytes for its shape, got {length}")
        self._external += expected
        if self._external > MOST_EXTERNAL:
            raise BadModel(f"expected at most {MOST_EXTERNAL} bytes in other files, got {self._external}")
        return _read(path, offset or 0, expected, MOST_EXTERNAL)


def _natural(text: str | None, name: str, key: str) -> int | None:
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BadModel(f"the tensor {name} has the {key} {_shown(text)}")
    return int(text)


def _of_bytes(content: bytes, dtype: torch.dtype, name: str) -> Tensor:
    """Numbers from little-endian bytes."""
    if not content:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if dtype == torch.bool and int(raw.max()) > 1:
        raise BadModel(f"the tensor {name} has numbers that do not fit its type")
    return raw.view(dtype)


def _shown(text: str) -> str:
    """A text from the file, short and without control characters."""
    return f"“{shown_text(text, 80)}”" if text else "without a name"
