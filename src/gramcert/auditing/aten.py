"""From the operators of torch.export to the graph, one small rule for each."""

import dataclasses
import math
import operator
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing import (
    aten_functions,
    aten_indexing,
    aten_layers,
    aten_products,
    aten_statistics,
    aten_windows,
)
from gramcert.auditing.aten_arguments import (
    Arguments,
    Context,
    Opaque,
    Rule,
    constants_in,
    require_real,
    run,
    variables_in,
)
from gramcert.auditing.memory import Memory, argument_names, may_share, written_arguments
from gramcert.auditing.program import Call, Program, Ref
from gramcert.operators import elementwise, rules
from gramcert.operators.graph import CONSEQUENCE, MOST_ENTRIES, BadModel, Graph, Unbounded, Variable
from gramcert.operators.linear import Shape
from gramcert.operators.rules import CHOICE, EMBEDDING, Consequence, Unknown, reason_of


def _words(text: str) -> set[str]:
    return set(text.split())


# Operators that only give entries other places: torch itself moves a tensor of places. Those in the first set share
# memory with what they are given.
VIEWS = _words(
    "view reshape _unsafe_view permute transpose t numpy_T mT flatten unflatten squeeze unsqueeze slice select "
    "expand expand_as narrow movedim swapaxes detach alias diagonal unfold view_as reshape_as"
)
COPIES = _words(
    "repeat flip roll tile index_select repeat_interleave rot90 pixel_shuffle pixel_unshuffle channel_shuffle "
    "native_channel_shuffle index tril triu im2col gather take take_along_dim"
)
SPLITS = _words("split split_with_sizes chunk unbind tensor_split")

# Views whose entries may share memory with each other.
OVERLAPPING = {"unfold", "as_strided", "expand", "expand_as", "broadcast_to"}

# What may be computed from constants alone: nothing that is random, that reads files or that can hang.
CONSTANT = _words(
    "add sub mul div neg abs sqrt rsqrt reciprocal exp log pow sum mean amax amin clamp clamp_min clamp_max "
    "maximum minimum cat stack matmul mm bmm full zeros ones arange full_like zeros_like ones_like scalar_tensor "
    "clone contiguous lift_fresh_copy lift_fresh _to_copy to type_as where eq ne lt le gt ge relu "
    "sigmoid tanh norm linalg_vector_norm square rsub linspace floor floor_divide remainder logical_not "
    "logical_and logical_or logical_xor sin cos _weight_norm _weight_norm_interface var std softmax _softmax "
    "log_softmax _log_softmax eye new_zeros new_ones new_full var_mean std_mean layer_norm native_layer_norm "
    "group_norm native_group_norm rms_norm cumsum cumprod prod logsumexp einsum mv dot outer addmm baddbmm addmv "
    "linear kron tensordot meshgrid erf erfc expm1 log1p log2 exp2 tan atan atan2 sinh cosh asinh sign sgn ceil round "
    "trunc frac fmod gelu silu softplus lerp addcmul addcdiv masked_fill linalg_norm true_divide constant_pad_nd pad "
    "diag diag_embed isfinite isnan isinf isin bitwise_not bitwise_and bitwise_or all any argmax argmin"
)
# The same of whole networks, whose inputs may be fixed.
CONSTANT |= _words(
    "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d elu selu celu leaky_relu "
    "hardtanh relu6 hardswish hardsigmoid mish prelu log_sigmoid max min embedding avg_pool1d avg_pool2d max_pool2d "
    "adaptive_avg_pool2d dropout alpha_dropout feature_dropout feature_alpha_dropout one_hot batch_norm"
)
# Those that normalise by what they are given, and would overwrite statistics if they had some.
WITHOUT_STATISTICS = _words("batch_norm native_batch_norm instance_norm")
SAME = _words(
    "dropout alpha_dropout feature_dropout feature_alpha_dropout clone contiguous to _to_copy type_as "
    "lift_fresh_copy lift_fresh lift detach_copy"
)

REASONS = {
    "scaled_dot_product_attention": "attention: a product of values that both depend on the input",
    "multi_head_attention_forward": "attention: a product of values that both depend on the input",
    "cond": "control flow that depends on data",
    "while_loop": "control flow that depends on data",
    **dict.fromkeys(("embedding", "embedding_bag"), EMBEDDING),
    **dict.fromkeys(("_unique2", "unique_dim"), CHOICE),
    "lstm": "recurrent layers multiply values that depend on the input",
    "gru": "recurrent layers multiply values that depend on the input",
    "glu": "a product of two values that both depend on the input",
    "rrelu_with_noise": "a random slope",
    "bernoulli": "random numbers",
    "rand_like": "random numbers",
    "randn_like": "random numbers",
    "native_dropout": "dropout in training mode is random",
    "item": "control flow that depends on data",
    **dict.fromkeys(("ne", "isnan", "isinf", "logical_not"), "a comparison jumps"),
    **dict.fromkeys(("argmax", "argmin", "nonzero", "argsort"), "an index jumps"),
}

RULES: dict[str, Rule] = {
    **aten_layers.RULES,
    **aten_products.RULES,
    **aten_indexing.RULES,
    **aten_windows.RULES,
    **aten_statistics.RULES,
    **aten_functions.RULES,
}

# Operators whose results are new, also where torch makes them of others that may not be. A sum of one product without
# any factor is a view.
FRESH = set(RULES) - {"einsum"} | set(elementwise.TABLE)

_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
}


class Translator(Context):
    """Walks through a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self._values: dict[str, Any] = dict(program.tensors)
        self._memory = Memory()
        self.changes: list[str] = []  # why calls overwrite parameters or buffers, or may do so
        self._told: set[str] = set()  # nodes whose shape only the program tells, with all that is made of them
        self.remedy = "call .eval() first" if program.is_live else self.remedy

    def run(self, shapes: dict[str, Shape]) -> Graph:
        """The graph for inputs of these shapes."""
        for name, shape in shapes.items():
            self._values[name] = self.b.input(name, shape)
            self.types[self._values[name].name] = self.program.types.get(name, torch.float32)
        for call in map(_without_tape, self.program.calls):
            values = {name: self._resolve(value) for name, value in call.arguments.items()}
            result = self._result(call, Arguments(call, values))
            if not self._told.isdisjoint(x.name for x in variables_in(values)):
                self._told.update(x.name for x in variables_in(result))
                # Sizes, and constants of that size.
                result = result if variables_in(result) else Opaque(f"{call.label}: of a shape that is not known")
            for x in variables_in(result):
                operation = self.b.node(x).operation
                # That of what is not known is not either; a square or a product is, and numbers beside it are rounded.
                if not isinstance(operation, Unbounded) or operation.name not in ("", CONSEQUENCE):
                    self.types.setdefault(x.name, self._type_after(call, values))
            self._bind(call, result)
        names = self.program.output_names or self.program.outputs
        for name, shown in zip(self.program.outputs, names, strict=True):
            value = self._read(name)
            if self.changes:
                value = Opaque(self.changes[0])
            if not isinstance(value, (Variable, Tensor, int, float, NoneType)):
                # It may be random, or overwritten by what depends on the input.
                self.b.at(name, "output", [])
                inputs = tuple(self._values[name] for name in shapes if isinstance(self._values[name], Variable))
                reason = value.reason if isinstance(value, Opaque) else "a result that is not a tensor"
                value = self.b.unbounded(inputs, (), reason)
            elif isinstance(value, Variable) and value.name in self._told:
                # Of another shape, what was left out or multiplied by 0 might not have been.
                self.b.at(name, "output", [])
                value = self.b.unbounded((value,), value.shape, str(Consequence()), CONSEQUENCE)
            self.b.output(shown, value)
        return self.b.graph

    def _type_after(self, call: Call, values: dict[str, Any]) -> torch.dtype:
        """That of a result: as asked for, that of the value it is made of, or promoted from all arguments."""
        wanted, arguments = values.get("dtype"), Arguments(call, values)
        if isinstance(wanted, torch.dtype) and wanted in rules.REAL:
            return wanted
        other = values.get("other") if arguments.op in SAME else None  # type_as, to
        if other is not None or arguments.in_place or arguments.op in VIEWS | COPIES | SPLITS:
            values = {"": other if other is not None else values.get("self", values.get("input"))}
        variables = [x for x in variables_in(values) if x.shape] or variables_in(values)  # scalars do not promote
        types = [self.type_of(x) for x in variables]
        types += [value.dtype for value in values.values() if isinstance(value, Tensor) and value.dim()]
        result = types[0] if types else torch.float32
        for other in types[1:]:
            result = torch.promote_types(result, other)
        return result

    def _result(self, call: Call, arguments: Arguments) -> Any:
        inputs = tuple(variables_in(arguments.values))
        self.b.at(call.label, call.target, constants_in(arguments.values))
        try:
            if any(isinstance(value, str) and value.startswith("<") for value in arguments.values.values()):
                raise Unknown("an argument of a kind that is not known")
            names = argument_names(call.target)
            if call.target.startswith("aten.") and (names is None or arguments.values.keys() - set(names)):
                raise Unknown("arguments that torch's operator does not have")
            if not inputs:
                return self._constant(arguments)
            if call.target == "getitem":
                whole = arguments.values["a"]
                if isinstance(whole, Variable):  # where there should be a list
                    lost = isinstance(self.b.node(whole).operation, Unbounded)
                    raise Consequence if lost else Unknown("results that are not followed one by one")
                return arguments.values["a"][arguments.values["b"]]
            if any(x.name in self.shapeless for x in inputs):
                raise Consequence
            return self._translated(arguments)
        except Exception as error:  # whatever a rule stumbles over, the value has no constant
            return self._lost(call, inputs, f"{arguments.op}: {reason_of(error)}", isinstance(error, Consequence))

    def _lost(self, call: Call, inputs: tuple[Variable, ...], reason: str, is_consequence: bool) -> Any:
        """Values of which nothing is known but, where the program says it, their shapes."""
        results = []
        for name in call.outputs:
            shape = self.program.shapes.get(name)
            shape = shape if shape is not None and math.prod(shape) <= MOST_ENTRIES else None
            result = self.b.unbounded(inputs, shape or (), reason, CONSEQUENCE if is_consequence else "")
            (self.shapeless if shape is None else self._told).add(result.name)
            results.append(result)
        return results if len(results) != 1 else results[0]

    def _translated(self, arguments: Arguments) -> Any:
        op = arguments.op
        if not arguments.target.startswith("aten."):
            raise Unknown(REASONS.get(op, "an operator that is not torch's own"))
        if op in RULES:
            return RULES[op](self, arguments)
        if op in SAME:
            if op.endswith("dropout") and arguments.get("train", False) and arguments.number("p", 0.5) > 0:
                raise Unknown(f"in training mode it is random; {self.remedy}")
            other = arguments.get("other")
            if isinstance(other, Variable) and other.name not in self.types:
                raise Consequence
            for dtype in (arguments.get("dtype"), other.dtype if isinstance(other, Tensor) else None):
                require_real(dtype)
            return self.b.same(arguments.x())
        if op in VIEWS | COPIES:
            return self._moved(arguments)
        if op in SPLITS:
            return self._split(arguments)
        if op in elementwise.TABLE:
            return aten_functions.of_table(self, arguments)
        raise Unknown(REASONS.get(op, "no rule is known for this operator"))

    def _constant(self, arguments: Arguments) -> Any:
        """What does not depend on the input is computed as torch does, from operators without side effects."""
        if arguments.target == "getitem":
            whole = arguments.values["a"]
            return whole if isinstance(whole, Opaque) else whole[arguments.values["b"]]
        if arguments.target in _INTEGERS:  # of sizes that the program leaves open
            values = list(arguments.values.values())
            known = all(isinstance(value, int) for value in values) and len(values) == 2
            return _INTEGERS[arguments.target](*values) if known else Opaque(f"{arguments.op} of sizes")
        allowed = arguments.op in CONSTANT | VIEWS | COPIES | SPLITS and not arguments.in_place
        allowed &= not (arguments.get("train", False) or arguments.get("training", False))
        if arguments.op in WITHOUT_STATISTICS:
            allowed |= arguments.values.get("running_mean") is None and arguments.values.get("running_var") is None
        if arguments.target.startswith("wrap_with_"):
            return Opaque(_change(arguments.target))
        if not allowed or not arguments.target.startswith("aten."):
            return Opaque(f"{arguments.op}: computed from constants by an operator that is not known")
        for value in arguments.values.values():
            if isinstance(value, Opaque):
                return value
        try:
            return run(arguments.target, arguments.values)
        except Exception as error:  # arguments of a hostile file can make an operator raise anything
            return Opaque(f"{arguments.op}: {str(error).splitlines()[0][:200] if str(error) else 'failed'}")

    def _moved(self, arguments: Arguments) -> Variable:
        if isinstance(arguments.get("dtype"), torch.dtype):
            raise Unknown("bits that are read as another type")
        name = "self" if "self" in arguments.values else "input"
        if arguments.op in ("index", "index_select") and not isinstance(arguments.values[name], Variable):
            raise Unknown(EMBEDDING)
        x = arguments.x()
        if len(variables_in(arguments.values)) > 1:
            other = arguments.values.get("other")
            if not isinstance(other, Variable):
                raise Unknown(CHOICE)
            arguments.values["other"] = torch.empty(other.shape, device="meta")
        if arguments.op == "index":
            arguments.values["indices"] = _as_places(arguments.values["indices"])
        kind = "pixel shuffle" if "shuffle" in arguments.op else arguments.op.strip("_")

        def move(places: Tensor) -> Tensor:
            # Some operators are not made for integers; places are exact as float64 too.
            values = places.double() if arguments.op == "im2col" else places
            moved: Tensor = run(arguments.target, arguments.values | {name: values})
            return moved.long()

        return self.b.moved(x, move, kind)

    def _split(self, arguments: Arguments) -> list[Variable]:
        x = arguments.x()
        count = math.prod(x.shape)
        if count > MOST_ENTRIES:
            raise Unknown(f"too large to be followed: {count} entries")
        places = torch.arange(1, count + 1).reshape(x.shape)
        parts = run(arguments.target, arguments.values | {"self": places})
        return [self.b.moved(x, lambda _, part=part: part, "slice") for part in parts]  # type: ignore[misc]

    # Names, and memory that is overwritten

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._read(value.name)
        if isinstance(value, (list, tuple)):
            return [self._resolve(item) for item in value]
        return value

    def _read(self, name: str) -> Any:
        if name not in self._values:
            raise BadModel(f"{name}: used before it is made")
        value = self._values[name]
        if name not in self._memory.lost:
            return value
        reason = f"{name}: its memory was overwritten through another name"
        if not isinstance(value, Variable):
            return Opaque(reason)
        self.b.at(name, "overwritten", [])
        return self.b.unbounded((value,), value.shape, reason)

    def _of_shape(self, name: str, value: Any) -> Any:
        """A value, if it has the shape that the program says: a rule that forgot to repeat entries is not believed."""
        shape = self.program.shapes.get(name)
        if not isinstance(value, Variable) or shape is None or value.shape == shape:
            return value
        if isinstance(self.b.node(value).operation, Unbounded):
            return value
        return self.b.unbounded((value,), shape, f"a shape {value.shape} where the program says {shape}")

    def _bind(self, call: Call, result: Any) -> None:
        unpacked = isinstance(result, (list, tuple)) and (call.unpacked or len(call.outputs) > 1)
        for name, value in zip(call.outputs, result if unpacked else [result], strict=False):
            self._values[name] = self._of_shape(name, value)
        for name in call.outputs:
            self._values.setdefault(name, Opaque(f"{call.target} has fewer results"))
        inputs = {name: _references(value) for name, value in call.arguments.items()}
        shared = [name for names in inputs.values() for name in names]
        op = Arguments(call, {}).op
        # The rules below are about operators that make new values, whatever they are made of inside of torch.
        if call.target in _INTEGERS:
            return
        is_new = op in FRESH and call.target.startswith("aten.")
        if not is_new and (call.target == "getitem" or may_share(call.target)):
            self._memory.share([*call.outputs, *shared])
        if call.target == "getitem":
            return
        if op in OVERLAPPING:
            self._memory.overlapping |= {*call.outputs}
        for argument in written_arguments(call.target, call.arguments):
            for name in inputs[argument]:
                self._overwrite(name, call)

    def _overwrite(self, name: str, call: Call) -> None:
        """A call writes into the memory behind a name, which then has its first result; the model's own must stay."""
        self._memory.share([name, *call.outputs])
        group = self._memory.group(name)
        if group & self.program.tensors.keys():
            self.changes.append(f"{call.label}: {_change(call.target)}")
        self._memory.overwrite(name, {name, *call.outputs})
        if not call.outputs or group & self._memory.overlapping:
            for member in (name, *call.outputs):
                self._values[member] = Opaque(f"{call.target}: what is written is not followed")
        else:
            self._values[name] = self._values[call.outputs[0]]


def _as_places(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks of truth values as the places that they choose, one list for each of their axes."""
    places: list[Tensor | None] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        places += index.nonzero().unbind(1) if is_mask else [index]  # type: ignore[union-attr]
    return places


def _change(target: str) -> str:
    """What a call does to the model's own tensors, or may do, such as a region of code with its own settings."""
    if target.startswith("aten."):
        return "it changes its own parameters or buffers when it is called"
    if not target.startswith("wrap_with_"):
        return f"{target} may change the parameters or buffers that it is given"
    return (
        f"weights go into {target}, a region of code that is not followed; of parametrised layers "
        "gramcert.nn.export(model) makes plain ones before torch.export"
    )


def _without_tape(call: Call) -> Call:
    """``detach_``, which every constant made in the model gets, writes nothing into memory: it is a view."""
    return dataclasses.replace(call, target="aten.detach.default") if call.target == "aten.detach_.default" else call


def _references(value: Any) -> list[str]:
    if isinstance(value, Ref):
        return [value.name]
    return [name for item in value for name in _references(item)] if isinstance(value, (list, tuple)) else []
