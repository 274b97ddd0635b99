"""Models of every kind as one graph."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gramcert.arguments import axis_sizes
from gramcert.auditing.architectures import ARCHITECTURES, build
from gramcert.auditing.archive import read_archive
from gramcert.auditing.fixing import Fix, Value, checked_fix, noted, with_fixed
from gramcert.auditing.living import of_module
from gramcert.auditing.program import Program
from gramcert.auditing.traced import of_exported
from gramcert.auditing.whole import guarded, of_program, several
from gramcert.files import BadFile, read_safetensors, read_torch
from gramcert.operators.graph import BadModel, Graph
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
        file: of a network that was read from another one than ``path``.
        weights: of a network built from a file of weights, what it was built from, to the last bit.
        shape: of one example, where the source is a network that knows it.
        fix: what its other inputs are fixed to.
    """

    name: str
    module: nn.Module | None = None
    path: Path | None = None
    exported: torch.export.ExportedProgram | None = None
    file: Path | None = None
    weights: str | None = None
    shape: Shape | None = None
    fix: dict[str, Value] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        call: str,
        model: nn.Module | torch.export.ExportedProgram | str | Path,
        architecture: str | None = None,
        prefix: str | None = None,
        fix: Fix | None = None,
    ) -> "Source":
        """A module, a program, or a file of any known kind."""
        return replace(cls._of(call, model, architecture, prefix), fix=checked_fix(call, fix))

    @classmethod
    def _of(
        cls,
        call: str,
        model: nn.Module | torch.export.ExportedProgram | str | Path,
        architecture: str | None,
        prefix: str | None,
    ) -> "Source":
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
            return cls(path.name, module=trained.model, file=path / "model.safetensors", shape=trained.shape)
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

    @property
    def sha256(self) -> str | None:
        """Of the file that it was read from."""
        file = self.file or self.path
        return None if file is None else file_digest(file)

    def read(self) -> None:
        """Raise what is wrong with a file that cannot be read, whatever is asked of it."""
        if self.module is None:
            with self._named():
                self._content  # noqa: B018 - kept

    def graph(self, call: str, input_shape: Shape, argument: str = "input_shape") -> Graph:
        """The internal graph for inputs of one shape, without the batch; ``argument`` is where the caller said it."""
        if self.module is not None:
            return of_module(call, self.module, input_shape, self.fix, f"{call}({argument})")
        with self._named():
            model, fixed = with_fixed(self._content, self.fix)
            if isinstance(model, Program):
                return noted(of_program(model, input_shape), fixed)
            from gramcert.auditing.onnx_nodes import graph_of

            return noted(guarded(lambda shapes: graph_of(model, shapes), model, input_shape), fixed)

    def declared_shape(self) -> Shape | None:
        """That of one example, where the source fixes it."""
        if self.module is not None:
            return self.shape
        with self._named():
            model, _ = with_fixed(self._content, self.fix)
            inputs = model.inputs
            if len(inputs) > 1:
                raise BadModel(several(model))
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


def require_model(path: Path) -> None:
    """Raise what is wrong with a file that cannot be a model; weights are read when their architecture is known."""
    _require_file(path)
    if path.suffix.lower() not in WEIGHTS:
        Source(path.name, path=path).read()


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise BadModel(f"{path}: expected a file, or a folder that `gramcert train` has finished; got another folder")
    if not path.exists():
        raise BadModel(f"{path}: no such file")
    if path.suffix.lower() not in ENDINGS:
        raise BadModel(f"{path}: expected a file ending in {', '.join(ENDINGS)}, got {path.suffix or 'no ending'!r}")
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
