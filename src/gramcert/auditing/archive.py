"""Programs from the archives that ``torch.export.save`` writes, of which nothing is ever executed.

torch's own reader unpickles sample inputs and some weights, and evaluates symbolic sizes as Python. Here the graph is
plain JSON, weights are the raw bytes of their storages, a symbolic size is only known to be one, and the pickle that
every archive has is searched for what it would call, not loaded.
"""

import io
import json
import math
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from gramcert.auditing.memory import argument_names
from gramcert.auditing.program import Call, Program, Ref
from gramcert.files import looks_like
from gramcert.operators.graph import BadModel

_T = TypeVar("_T")

# Of the serialised graph. A change of the first number breaks readers, as torch promises; the second one adds fields.
SCHEMA_VERSION = 8

# Members of an archive, bytes of a JSON member and of the pickle inside of the sample inputs, dimensions of a tensor.
# Large models have 10⁴, 2²⁵, 2¹² and 6.
MOST_MEMBERS, LARGEST_JSON, LARGEST_PICKLE, MOST_DIMENSIONS = 2**18, 2**26, 2**20, 64

# Characters of a file's own words that an error repeats.
SHOWN = 80

# What torch.export.save writes below its top folder; texts that a user may have added are not read.
_LAYOUT = re.compile(
    r"models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(model_weights_config\.json|weight_\d+)|data/constants/(model_constants_config\.json|tensor_\d+)"
    r"|archive_format|archive_version|byteorder|version|\.(data/\w+|format_version|storage_alignment)"
    r"|extra/[\w-]+(\.(txt|md|json|yaml|yml|toml|csv))?",
    re.ASCII,
)
_OLDER = re.compile(r"(.*/)?(serialized_\w+\.(json|pt)|data/(weights|constants)/model\.pt)")

# The same of torch.save, which holds the sample inputs, and all that a pickle of tensors calls.
_LAYOUT_OF_INPUTS = re.compile(
    r"data\.pkl|data/\d+|byteorder|version|\.(data/\w+|format_version|storage_alignment)", re.ASCII
)
_HARMLESS = re.compile(
    r"torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter)|torch ([A-Z]\w+Storage|Tensor|uint16|uint32|uint64)"
    r"|torch\.storage UntypedStorage|torch\._tensor _rebuild_from_type_v2|collections OrderedDict",
    re.ASCII,
)

# Bits of a zip member that say that its bytes are encrypted, patched, or hide their header.
_ENCRYPTED = 0x0001 | 0x0020 | 0x0040 | 0x2000

# Bytes of a zip file: the least before a member, and all after the directory where there is no comment.
_SMALLEST_HEADER, _END_RECORD = 30, 22

_ROOT = re.compile(r"^L(__self__|\['self'\])[._]*")
_MODULE = re.compile(r"[\w.\- @]{1,200}")
_NAME = re.compile(r"\w{1,200}")
_TARGET = re.compile(r"[\w.:#]{1,200}")

# torch's codes, and how it writes what JSON cannot.
_DTYPES = {1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 12: torch.bool}
_DTYPES |= {6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16}
_DTYPES |= {28: torch.uint16, 34: torch.uint32, 35: torch.uint64}
_STRIDED = 7
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

# How an argument is passed: torch gives those of other kinds by their place, whatever name the file has for them.
_KEYWORD = 2

# What a model may return: tensors, and what is the same for all inputs.
_RESULTS = ("as_tensor", "as_none", "as_int", "as_float", "as_bool", "as_string")


def read_archive(path: Path) -> Program:
    """The program in a ``.pt2`` file of ``torch.export.save``.

    Raises:
        BadModel: the file is damaged, asks for code to be run, or holds more than tensors and calls.
    """
    try:
        if not path.is_file():  # also not a pipe, which might never end
            raise BadModel("expected a file, got " + ("something else" if path.exists() else "nothing of that name"))
        with path.open("rb") as stream:
            return _program(_open(stream, _LAYOUT))
    except BadModel as error:
        raise BadModel(f"{path}: {error}") from None
    except Exception as error:  # a damaged or hostile file can make a parser raise anything
        reason = (str(error).splitlines() or [""])[0][:SHOWN]
        raise BadModel(f"{path}: cannot be read ({type(error).__name__}: {reason})") from error


@dataclass(frozen=True)
class _Archive:
    """A zip file whose members were checked, by their names below its top folder."""

    stream: zipfile.ZipFile
    members: dict[str, zipfile.ZipInfo]

    def read(self, name: str, limit: int | None = None) -> bytes:
        if name not in self.members:
            raise BadModel(f"expected the member {_shown(name)}, which is not in it")
        size = self.members[name].file_size
        if limit is not None and size > limit:
            raise BadModel(f"expected at most {limit} bytes in {name}, got {size}")
        return self.stream.read(self.members[name])

    def json(self, name: str) -> Any:
        content = self.read(name, LARGEST_JSON)
        try:
            return json.loads(content, parse_constant=_no_constant)
        except RecursionError:
            raise BadModel(f"{name} is nested too deeply") from None
        except ValueError as error:
            raise BadModel(f"{name} is not JSON ({error})") from None


def _open(stream: IO[bytes], layout: re.Pattern[str]) -> _Archive:
    """The archive, all of whose members are stored as they are, in bytes of their own, under expected names.

    So the sum of their sizes is at most the size of the file, whatever the directory of the archive claims. The archive
    is all of the file, so that no other program finds another one in it.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(size - _END_RECORD, 0))
    if not stream.read().startswith(b"PK\5\6"):
        stream.seek(0)
        start = stream.read(64)
        kind = "" if start.startswith(b"PK") else looks_like(start)
        raise BadModel(f"expected a zip archive, got a truncated or other file{kind}")
    archive = zipfile.ZipFile(stream)
    if len(archive.filelist) > MOST_MEMBERS:
        raise BadModel(f"expected at most {MOST_MEMBERS} members, got {len(archive.filelist)}")
    if any(_OLDER.fullmatch(name) for name in archive.namelist()):
        raise BadModel("its weights are pickles, as older versions of torch wrote them; save it again with a newer one")
    members, folder, end = dict[str, zipfile.ZipInfo](), None, 0
    for member in sorted(archive.filelist, key=lambda member: member.header_offset):
        top, _, name = member.orig_filename.partition("/")  # `filename` ends at a zero byte
        shown = _shown(member.orig_filename)
        if top in ("", ".", "..") or "\\" in top or top != (folder or top) or not layout.fullmatch(name):
            raise BadModel(f"expected only members that torch writes for plain models, got {shown}")
        if name in members:
            raise BadModel(f"expected names that differ, got {shown} twice")
        if member.flag_bits & _ENCRYPTED:
            raise BadModel(f"expected plain members, got {shown} encrypted")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise BadModel(f"expected members that are stored as they are, got {shown} compressed")
        if member.header_offset < end or (member.header_offset and not members):
            raise BadModel(f"expected members beside each other, got {shown} at byte {member.header_offset}")
        members[name], folder = member, top
        end = member.header_offset + _SMALLEST_HEADER + member.file_size
    if end > archive.start_dir:
        raise BadModel(f"expected members inside of the file, got one that ends at byte {end} of {archive.start_dir}")
    return _Archive(archive, members)


def _no_constant(text: str) -> Any:
    raise BadModel(f"expected finite numbers in JSON, got {text}")


def _shown(value: object) -> str:
    """A value from the file, short and without control characters."""
    text = ascii(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _words(text: str) -> str:
    """The same for a text that people know, without quotes."""
    return _shown(text)[1:-1]


def _typed(value: Any, kind: type[_T], place: str) -> _T:
    if type(value) is not kind:  # true is no number
        raise BadModel(f"expected {kind.__name__} as {place}, got {_shown(value)}")
    return value


def _field(record: Any, key: str, kind: type[_T]) -> _T:
    """A field of a JSON record that must be there with this type."""
    return _typed(_typed(record, dict, "record").get(key), kind, _shown(key))


def _union(record: Any) -> tuple[str, Any]:
    """The kind and the content of a record that has one of several fields."""
    if not isinstance(record, dict) or len(record) != 1:
        raise BadModel(f"expected a record with one field, got {_shown(record)}")
    return next(iter(record.items()))


def _program(archive: _Archive) -> Program:
    for name, expected in (("archive_format", b"pt2"), ("archive_version", b"0"), ("byteorder", b"little")):
        if (content := archive.read(name, SHOWN)) != expected:
            raise BadModel(f"expected {expected.decode()} as {name}, got {_shown(content)}")
    _require_harmless(archive.read("data/sample_inputs/model.pt"))
    model = archive.json("models/model.json")
    version = _field(_field(model, "schema_version", dict), "major", int)
    if version != SCHEMA_VERSION:
        raise BadModel(f"expected version {SCHEMA_VERSION} of the schema, got {version}")
    module = _field(model, "graph_module", dict)
    graph, signature = _field(module, "graph", dict), _field(module, "signature", dict)
    inputs, tensors = _inputs(graph, signature, _tensors(archive, "weights"), _tensors(archive, "constants"))
    types = {name: _dtype(_field(_field(graph, "tensor_values", dict), name, dict)) for name in inputs}
    known = inputs.keys() | tensors.keys()
    calls = [_call(node, known) for node in _field(graph, "nodes", list)]
    outputs, changed = _outputs(graph, signature, known)
    results = [name for call in calls for name in call.outputs]
    shapes = {name: shape for name in results if (shape := _shape_of(graph, name)) is not None}
    return Program(inputs, tensors, calls, outputs, changed, types, shapes)


def _shape_of(graph: dict[str, Any], name: str) -> tuple[int, ...] | None:
    """That of a result, if the file says it and leaves nothing open."""
    values = _field(graph, "tensor_values", dict)
    if name not in values:
        return None
    sizes = _field(_field(values, name, dict), "sizes", list)[: MOST_DIMENSIONS + 1]
    if len(sizes) > MOST_DIMENSIONS or any(_union(size)[0] != "as_int" for size in sizes):
        return None
    return tuple(map(_length, sizes))


def _require_harmless(content: bytes) -> None:
    """Sample inputs are not needed, but whoever gives the file to torch next would run what they ask for."""
    try:
        wanted = next(_calls_of_pickle(content), None) if content else None
    except ValueError as error:  # of which BadModel is one
        raise BadModel(f"expected sample inputs that are tensors, got a damaged file ({error})") from None
    if wanted:
        raise BadModel(f"expected sample inputs that are tensors; it asks to run {wanted}, which was not done")


def _calls_of_pickle(content: bytes) -> Iterator[str]:
    """Names in a file of ``torch.save`` of what its pickle would call, those left out that make tensors."""
    pickled = _open(io.BytesIO(content), _LAYOUT_OF_INPUTS).read("data.pkl", LARGEST_PICKLE)
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST") and not _HARMLESS.fullmatch(str(argument)):
            yield _words(str(argument).replace(" ", "."))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            yield "something whose name it puts together"


def _tensors(archive: _Archive, folder: str) -> dict[str, Tensor]:
    """Tensors by the names they have in the model. Those that share a storage in the file share it here."""
    config = _field(archive.json(f"data/{folder}/model_{folder}_config.json"), "config", dict)
    storages, tensors = dict[str, Tensor](), dict[str, Tensor]()
    for name, entry in config.items():
        try:
            if _field(entry, "use_pickle", bool):
                raise BadModel("it is stored as a pickle, which could run code")
            member, meta = f"data/{folder}/{_field(entry, 'path_name', str)}", _field(entry, "tensor_meta", dict)
            if member not in storages:
                storages[member] = _storage(archive.read(member), meta)
            tensors[name] = _view(storages[member], meta)
        except BadModel as error:
            raise BadModel(f"tensor {_shown(name)}: {error}") from None
    return tensors


def _dtype(meta: dict[str, Any]) -> torch.dtype:
    code, layout = _field(meta, "dtype", int), _field(meta, "layout", int)
    if code not in _DTYPES or layout != _STRIDED:
        raise BadModel(f"expected dense real numbers, got type {code} with layout {layout} of torch's schema")
    return _DTYPES[code]


def _storage(content: bytes, meta: dict[str, Any]) -> Tensor:
    """All numbers of one member."""
    dtype = _dtype(meta)
    if len(content) % dtype.itemsize:
        raise BadModel(f"expected numbers of {dtype.itemsize} bytes, got {len(content)} bytes")
    if dtype == torch.bool and content.strip(b"\0\1"):
        raise BadModel("expected truth values, got bytes other than 0 and 1")
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _view(storage: Tensor, meta: dict[str, Any]) -> Tensor:
    """A tensor in its storage, after a check that it lies there and has no more elements than were stored.

    The last excludes tensors that repeat their elements, which take no memory here but any amount once copied.
    """
    sizes, strides = _lengths(meta, "sizes"), _lengths(meta, "strides")
    offset = _length(_field(meta, "storage_offset", dict))
    if _dtype(meta) != storage.dtype:
        raise BadModel(f"expected {storage.dtype}, as the other tensors of its storage, got {_dtype(meta)}")
    if len(sizes) != len(strides):
        raise BadModel(f"expected as many strides as sizes, got {len(strides)} and {len(sizes)}")
    count, last = math.prod(sizes), offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if count > storage.numel() or (count and last >= storage.numel()):
        raise BadModel(
            f"expected a view of the {storage.numel()} stored numbers, got sizes {_shown(sizes)}, "
            f"strides {_shown(strides)} and offset {offset}"
        )
    return storage.as_strided(sizes, strides, offset) if count else storage.new_empty(sizes)


def _lengths(meta: dict[str, Any], key: str) -> list[int]:
    lengths = [_length(length) for length in _field(meta, key, list)[: MOST_DIMENSIONS + 1]]
    if len(lengths) > MOST_DIMENSIONS:
        raise BadModel(f"expected at most {MOST_DIMENSIONS} {key}")
    return lengths


def _length(record: Any) -> int:
    length = _field(record, "as_int", int)
    if not 0 <= length < 2**63:
        raise BadModel(f"expected a length, got {_shown(length)}")
    return length


def _inputs(
    graph: dict[str, Any], signature: dict[str, Any], weights: dict[str, Tensor], constants: dict[str, Tensor]
) -> tuple[dict[str, tuple[int | None, ...]], dict[str, Tensor]]:
    """What the caller passes, and what the file holds. The graph names its inputs, the signature says what they are."""
    specs, arguments = _field(signature, "input_specs", list), _field(graph, "inputs", list)
    if len(specs) != len(arguments):
        raise BadModel(f"expected {len(arguments)} inputs in the signature, got {len(specs)}")
    shapes, tensors, known = dict[str, tuple[int | None, ...]](), dict[str, Tensor](), set[str]()
    for spec, argument in zip(specs, arguments, strict=True):
        kind, content = _union(spec)
        if kind == "constant_input":  # of which export has made constants of the calls
            continue
        if kind not in ("user_input", "parameter", "buffer", "tensor_constant"):
            raise BadModel(f"expected only tensors as inputs, got a {_shown(kind)}")
        target, value = _field(content, "arg", dict), _value(argument)
        if "as_tensor" not in argument:
            raise BadModel(f"expected only tensors as inputs, got {_shown(argument)}")
        if argument != (target if kind == "user_input" else {"as_tensor": target}):
            raise BadModel(f"expected {_shown(target)} as in the signature, got the input {_shown(argument)}")
        name = _define(value.name, known)
        if kind == "user_input":
            sizes = _field(_field(_field(graph, "tensor_values", dict), name, dict), "sizes", list)
            shapes[name] = tuple(None if _union(size)[0] == "as_expr" else _length(size) for size in sizes)
        else:
            in_weights = kind == "parameter" or (kind == "buffer" and _field(content, "persistent", bool))
            stored, key = weights if in_weights else constants, _field(content, f"{kind}_name", str)
            if key not in stored:
                raise BadModel(f"expected a tensor {_shown(key)}, which is not in it")
            tensors[name] = stored[key]
    return shapes, tensors


def _outputs(
    graph: dict[str, Any], signature: dict[str, Any], known: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Results that are tensors, and what is overwritten. Results that export found to be constants are left out."""
    specs, arguments = _field(signature, "output_specs", list), _field(graph, "outputs", list)
    if len(specs) != len(arguments):
        raise BadModel(f"expected {len(arguments)} results in the signature, got {len(specs)}")
    outputs, changed = list[str](), list[str]()
    for spec, argument in zip(specs, arguments, strict=True):
        (kind, content), (sort, _), value = _union(spec), _union(argument), _value(argument)
        _require_known(value, known, "the result")
        if kind.endswith("_mutation"):  # of a buffer, a parameter or an input
            changed.append(_words(_field(content, f"{kind.removesuffix('_mutation')}_name", str)))
        elif kind != "user_output" or sort not in _RESULTS:
            raise BadModel(f"expected only tensors as results, got {_shown(argument)} as {_words(kind)}")
        elif isinstance(value, Ref):
            outputs.append(value.name)
    return tuple(outputs), tuple(changed)


def _call(node: Any, known: set[str]) -> Call:
    """One call, whose results become known."""
    target = _field(node, "target", str).removeprefix("torch.ops.").removeprefix("_operator.")
    if not _TARGET.fullmatch(target):
        raise BadModel(f"expected the name of an operator, got {_shown(target)}")
    arguments, positional = dict[str, Any](), list[str]()
    for place, argument in enumerate(_field(node, "inputs", list)):
        key = _field(argument, "name", str) or str(place)  # operators without a schema have no names for them
        if key in arguments:
            raise BadModel(f"expected each argument of {target} once, got {_shown(key)} twice")
        arguments[key] = _value(_field(argument, "arg", dict))
        if argument.get("kind") != _KEYWORD:
            positional.append(key)
    expected = argument_names(target)
    if expected is not None and positional != expected[: len(positional)]:
        raise BadModel(f"expected arguments of {target} in the order {_shown(expected)}, got {_shown(positional)}")
    _require_known(list(arguments.values()), known, target)
    outputs = list[str]()
    for place, argument in enumerate(_field(node, "outputs", list)):
        value = _value(argument)
        if not isinstance(value, Ref | list | None):
            raise BadModel(f"expected names of the results of {target}, got {_shown(argument)}")
        # A result that is missing keeps its place, under a name that nothing can refer to.
        outputs += [f"<none {place}>"] if value is None else [_define(name, known) for name in _references(value)]
    return Call(target, arguments, tuple(outputs), _label(node, (*outputs, target)[0]), unpacked=True)


def _label(node: dict[str, Any], otherwise: str) -> str:
    """The innermost module around a call, or the name of the call where this is the whole model."""
    metadata, name = node.get("metadata"), node.get("name")
    stack = metadata.get("nn_module_stack") if isinstance(metadata, dict) else None
    fields = stack.split(";")[-1].split(",") if isinstance(stack, str) else []  # key, path, type of each module
    if len(fields) == 3 and fields[1] != fields[2]:  # all the same where export does not know
        path = _ROOT.sub("", fields[1])
        if _MODULE.fullmatch(path):
            return path
    return name if isinstance(name, str) and _NAME.fullmatch(name) else otherwise


def _define(name: str, known: set[str]) -> str:
    if not _NAME.fullmatch(name):
        raise BadModel(f"expected a name of letters and digits, got {_shown(name)}")
    if name in known:
        raise BadModel(f"expected each value to be computed once, got {name} twice")
    known.add(name)
    return name


def _require_known(value: Any, known: set[str], user: str) -> None:
    for name in _references(value):
        if name not in known:
            raise BadModel(f"expected values that were computed before, got {_shown(name)} for {user}")


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _value(argument: Any) -> Any:
    """An argument as Python's own value; of a kind that is not known here ``"<kind>"``, which no operator accepts.

    A graph, which is an argument of ``cond`` and its like, is such a kind: it sees nothing but the other arguments.
    """
    kind, content = _union(argument)
    return _VALUES[kind](content) if kind in _VALUES else f"<{_words(kind)}>"


def _each(convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def converted(content: Any) -> list[Any]:
        return [convert(item) for item in _plain(list)(content)]

    return converted


def _plain(kind: type[_T]) -> Callable[[Any], _T]:
    return lambda content: _typed(content, kind, "argument")


def _coded(names: dict[int, Any], kind: str) -> Callable[[Any], Any]:
    return lambda content: names.get(_plain(int)(content), f"<{kind}>")


def _number(content: Any) -> float:
    return _NOT_FINITE[content] if content in _NOT_FINITE else _plain(float)(content)


def _device(content: Any) -> str:
    kind, index = _field(content, "type", str), content.get("index")
    return kind if index is None else f"{kind}:{_typed(index, int, 'index')}"


def _tensor(content: Any) -> Ref:
    return Ref(_field(content, "name", str))


_ONE: dict[str, Callable[[Any], Any]] = {
    "as_tensor": _tensor,
    "as_optional_tensor": _value,
    "as_int": _plain(int),
    "as_float": _number,
    "as_bool": _plain(bool),
    "as_string": _plain(str),
    "as_sym_int": _value,
    "as_sym_float": _value,
    "as_sym_bool": _value,
}
_VALUES: dict[str, Callable[[Any], Any]] = _ONE | {f"{kind}s": _each(convert) for kind, convert in _ONE.items()}
_VALUES |= {
    "as_none": lambda content: None,
    "as_name": lambda content: Ref(_plain(str)(content)),
    "as_nested_tensors": _each(_each(_tensor)),
    "as_int_lists": _each(_each(_plain(int))),
    "as_float_lists": _each(_each(_number)),
    "as_scalar_type": _coded(_DTYPES, "as_scalar_type"),
    "as_memory_format": _coded(_MEMORY_FORMATS, "as_memory_format"),
    "as_layout": _coded({_STRIDED: "strided"}, "as_layout"),
    "as_device": _device,
    # A list of its values, so that what the call depends on is seen.
    "as_string_to_argument": lambda content: _each(_value)(list(_plain(dict)(content).values())),
}
