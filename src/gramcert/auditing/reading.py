"""Models of every kind as one graph."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gramcert.arguments import axis_sizes
from gramcert.auditing.architectures import ARCHITECTURES, build
from gramcert.auditing.archive import read_archive
from gramcert.auditing.aten import Translator
from gramcert.auditing.program import Program
from gramcert.auditing.state import kept
from gramcert.auditing.traced import of_exported, traced
from gramcert.files import BadFile, read_safetensors, read_torch
from gramcert.geometry.recognition import UnsteadyWeightError, random_state
from gramcert.nn.baking import frozen_copy, plain_copy
from gramcert.operators.graph import MOST_ENTRIES, BadModel, Builder, Graph, Unbounded
from gramcert.operators.linear import Shape

if TYPE_CHECKING:  # loaded where they are needed
    from gramcert.auditing.onnx_file import OnnxModel
    from gramcert.training.checkpoints import Trained

WEIGHTS = (".safetensors", ".pt", ".pth", ".th")
ENDINGS = (".onnx", ".pt2", *WEIGHTS)


@dataclass(frozen=True)
class Source:
    """A model to be audited.

    Attributes:
        name: for people.
        module: in memory, or built from weights.
        path: of a file.
        exported: a program of torch.export in memory.
        weights: of a network built from a file of weights, what it was built from, to the last bit.
        shape: of one example, where the source is a network that knows it.
    """

    name: str
    module: nn.Module | None = None
    path: Path | None = None
    exported: torch.export.ExportedProgram | None = None
    weights: str | None = None
    shape: Shape | None = None

    @classmethod
    def of(
        cls,
        call: str,
        model: nn.Module | torch.export.ExportedProgram | str | Path,
        architecture: str | None = None,
        prefix: str | None = None,
    ) -> "Source":
        """A module, a program, or a file of any known kind."""
        if isinstance(model, (nn.Module, torch.export.ExportedProgram)):
            if architecture is not None or prefix is not None:
                raise ValueError(f"{call}(architecture, prefix): for files of weights only, got a module")
            if isinstance(model, torch.export.ExportedProgram):
                return cls("ExportedProgram", exported=model)
            return cls(type(model).__name__, module=model)
        if not isinstance(model, (str, Path)):
            raise TypeError(f"{call}(model): expected a torch.nn.Module or a file, got {type(model).__name__}")
        path = Path(model)
        if path.is_dir() and (trained := _trained(path)):
            return cls(path.name, module=trained.model, shape=trained.shape)
        _require_file(path)
        if path.suffix.lower() in WEIGHTS:
            built_from = repr((file_digest(path), path.name, architecture, prefix))
            trained = _trained(path) if architecture is None else None
            module = _built(path, architecture, prefix) if trained is None else trained.model
            shape = None if trained is None else trained.shape
            return cls(path.name, module=module, path=path, weights=built_from, shape=shape)
        if architecture is not None or prefix is not None:
            raise ValueError(f"{path.name}: --architecture and --prefix are for files of weights only")
        return cls(path.name, path=path)

    def graph(self, call: str, input_shape: Shape, argument: str = "input_shape") -> Graph:
        """The internal graph for inputs of one shape, without the batch; ``argument`` is where the caller said it."""
        if self.module is not None:
            return _of_module(call, self.module, input_shape, argument)
        with self._named():
            if isinstance(self._content, Program):
                return _of_program(self._content, input_shape)
            from gramcert.auditing.onnx_nodes import graph_of

            model = self._content
            return _guarded(lambda shapes: graph_of(model, shapes), model.inputs, input_shape)

    def declared_shape(self) -> Shape | None:
        """That of one example, where the source fixes it."""
        if self.module is not None:
            return self.shape
        with self._named():
            inputs = self._content.inputs
        shapes = [tuple(size for size in shape[1:] if size is not None) for shape in inputs.values()]
        fixed = len(shapes) == 1 and len(shapes[0]) == len(next(iter(inputs.values()))) - 1
        return shapes[0] if fixed and shapes[0] else None

    @functools.cached_property
    def _content(self) -> "Program | OnnxModel":
        """What is read of a file, once."""
        if self.exported is not None:
            return of_exported(self.exported)
        assert self.path is not None
        if self.path.suffix.lower() != ".onnx":
            return read_archive(self.path)
        from gramcert.auditing.onnx_file import read_onnx

        return read_onnx(self.path)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors name the file."""
        try:
            yield
        except BadModel as error:
            text, name = str(error), "" if self.path is None else self.path.name
            raise BadModel(text if text.startswith(name) else f"{name}: {text}") from None


def shape_of_example(call: str, given: Sequence[int] | Tensor) -> Shape:
    """The shape of one example without the batch, from that shape or from an example with it."""
    if isinstance(given, Tensor):
        if not given.dim():
            raise ValueError(f"{call}(input_shape): expected an example with its batch, got a tensor without axes")
        given = tuple(given.shape[1:])
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"{call}(input_shape): expected a sequence of ints or an example, got {given!r}")
    return axis_sizes(call, "input_shape", given, len(given), what="the model")


def file_digest(path: Path) -> str:
    """Of the whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise BadModel(f"{path}: expected a file, or a folder that `gramcert train` has finished; got another folder")
    if path.suffix.lower() not in ENDINGS:
        raise BadModel(f"{path}: expected a file ending in {', '.join(ENDINGS)}, got {path.suffix or 'no ending'!r}")
    if not path.exists():
        raise BadModel(f"{path}: no such file")
    if not path.is_file():
        raise BadModel(f"{path}: not a regular file")
    if path.stat().st_size == 0:
        raise BadModel(f"{path}: the file is empty")


def _built(path: Path, architecture: str | None, prefix: str | None) -> nn.Module:
    """A network of ours from a file of weights."""
    try:
        found = read_safetensors(path) if path.suffix.lower() == ".safetensors" else read_torch(path)
        if isinstance(found, Tensor):
            raise BadFile("it holds one tensor without a name")
    except BadFile as error:
        raise BadModel(f"{path.name}: {error}") from None
    except Exception as error:  # a damaged or hostile file can make a parser raise anything
        first = (str(error).splitlines() or [""])[0]
        raise BadModel(f"{path.name}: cannot be read ({type(error).__name__}: {first})") from error
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise BadModel(
            f"{path.name}: it holds {len(found)} tensors and nothing about the order of the layers; name their "
            f"architecture (--architecture, one of {known}), or give the model as .pt2 or ONNX"
        )
    try:
        return build(architecture, _unprefixed(found, prefix))
    except ValueError as error:
        raise BadModel(f"{path.name}: {error}") from None


def _trained(path: Path) -> "Trained | None":
    """What ``gramcert train`` left in a folder or file, if that is one; training is loaded only then."""
    from gramcert.training.checkpoints import Trained, is_trained

    return Trained(path) if is_trained(path) else None


def _unprefixed(weights: dict[str, Tensor], prefix: str | None) -> dict[str, Tensor]:
    """The weights under a prefix; without one, under those that training loops and DataParallel put there."""
    if prefix is not None:
        found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        if not found:
            raise ValueError(f"no weight has the prefix {prefix!r}, only such as {', '.join(list(weights)[:3])}")
        return found
    inner = {name.removeprefix("state_dict."): value for name, value in weights.items() if "state_dict." in name[:11]}
    return {name.removeprefix("module."): value for name, value in (inner or weights).items()}


def _of_module(call: str, module: nn.Module, input_shape: Shape, argument: str) -> Graph:
    name, shape = type(module).__name__, (1, *input_shape)
    try:
        model = plain_copy(call, module)
    except UnsteadyWeightError as error:
        return _unbounded_graph(name, shape, str(error).partition(": ")[2])
    for path, part in model.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.training and not _is_instance_norm(part):
            reason = "batch normalisation in training mode mixes the examples of a batch; call .eval() first"
            return _unbounded_graph(path or name, shape, reason)
    tensors = [*model.parameters(), *model.buffers()]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if any(tensor.layout != torch.strided or tensor.is_meta for tensor in tensors):
        raise TypeError(f"{call}(model): expected dense tensors with values, got sparse or meta tensors")
    if math.prod(input_shape) > MOST_ENTRIES:
        raise ValueError(f"{call}({argument}): expected at most {MOST_ENTRIES} entries, got shape {input_shape}")
    # Not zeros: a model that adds what it was given before would be taken for one that adds a constant.
    example = torch.linspace(-1, 1, math.prod(input_shape)).reshape(1, *input_shape).to(device, dtype)
    called, drawn = plain_copy(call, model), random_state()  # a copy: a model may change when it is called
    with torch.no_grad():
        try:
            frozen_copy(call, module)(example)  # whose layers check what they are given
            called(example)
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            hint = _hint(plain_copy(call, model), example)
            raise ValueError(
                f"{call}({argument}): the model cannot take an input of shape {input_shape}{hint}: {first}"
            ) from None
    try:
        program = traced(model, example)
        graph = _of_program(program, input_shape)
        if any(isinstance(node.operation, Unbounded) for node in graph.needed().nodes.values()):
            return graph
        reason = _change(called, example, program, drawn)
    except BadModel as error:
        return _unbounded_graph(name, shape, str(error))
    return _unbounded_graph(name, shape, reason) if reason else graph


def _hint(model: nn.Module, example: Tensor) -> str:
    """Whether a shape was given with the batch."""
    try:
        model(example[0])
    except Exception:  # a model may contain any Python code
        return ""
    return f" (without the batch it is {tuple(example.shape[2:])})"


def _change(called: nn.Module, example: Tensor, program: Program, drawn: object) -> str:
    """What a model, called once before, does otherwise than its program says; empty if nothing is found."""
    held: list[object] = []
    before = kept(called, held)
    with torch.no_grad():
        try:
            called(example)
        except Exception as error:  # a model may contain any Python code
            return f"it cannot be called twice ({type(error).__name__})"
    after = kept(called, held)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        return f"it changes what it keeps when it is called: {', '.join(changed[:3])}"
    if random_state() != drawn:
        return "it draws random numbers when it is called"
    return "" if traced(called, example).is_same(program) else "it does something else when it is called again"


def _is_instance_norm(module: nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)


def _of_program(program: Program, input_shape: Shape) -> Graph:
    if program.changed:
        reason = f"it changes its own buffers when it is called: {', '.join(program.changed[:3])}"
        return _unbounded_graph("model", (1, *input_shape), reason)
    return _guarded(Translator(program).run, program.inputs, input_shape)


def _guarded(
    translate: Callable[[dict[str, Shape]], Graph], inputs: dict[str, tuple[int | None, ...]], input_shape: Shape
) -> Graph:
    """The graph of a model with exactly one input."""
    if len(inputs) != 1:
        reason = f"it takes {len(inputs)} inputs ({', '.join(inputs)}), and a constant is about one"
        return _unbounded_graph("model", (1, *input_shape), reason)
    ((name, declared),) = inputs.items()
    graph = translate({name: matched(name, declared, input_shape)})
    if not graph.outputs and not graph.constant_outputs:
        raise BadModel("it has no outputs")
    return graph


def matched(name: str, declared: Sequence[int | None], input_shape: Shape) -> Shape:
    """The declared shape with its open sizes filled in: the batch is what the file says, or 1."""
    if len(declared) == len(input_shape) + 1:
        shape = (1 if declared[0] is None else declared[0], *input_shape)
    elif len(declared) == len(input_shape):
        shape = input_shape
    else:
        raise BadModel(f"its input {name} has the shape {_open(declared)}, got {_open(input_shape)}")
    if any(size not in (None, given) for size, given in zip(declared, shape, strict=True)):
        raise BadModel(f"its input {name} has the shape {_open(declared)}, got {_open(input_shape)}")
    return shape


def _open(shape: Sequence[int | None]) -> str:
    return ",".join("?" if size is None else str(size) for size in shape)


def _unbounded_graph(name: str, shape: Shape, reason: str) -> Graph:
    """A model of which nothing is known but why."""
    builder = Builder()
    x = builder.input("input", shape)
    builder.at(name, "model", [])
    builder.output("output", builder.unbounded((x,), (), reason))
    return builder.graph
