"""From the operators of torch.export to the graph, one small rule for each."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing import activations, rules
from gramcert.auditing.graph import MOST_ENTRIES, Builder, Graph, Nonlinear, Variable
from gramcert.auditing.linear import Shape
from gramcert.auditing.memory import Memory, may_share, written_arguments
from gramcert.auditing.patterns import SIGN, SQUARE, Patterns
from gramcert.auditing.program import BadModel, Call, Program, Ref
from gramcert.auditing.rules import Unknown

Rule = Callable[["Translator", "Arguments"], Any]


def _words(text: str) -> set[str]:
    return set(text.split())


# Operators that only give entries other places: torch itself moves a tensor of places. Those in the first set share
# memory with what they are given.
VIEWS = _words(
    "view reshape _unsafe_view permute transpose t numpy_T mT flatten unflatten squeeze unsqueeze slice select "
    "expand expand_as narrow movedim swapaxes detach alias diagonal unfold view_as reshape_as _reshape_alias"
)
COPIES = _words(
    "repeat flip roll tile index_select repeat_interleave rot90 pixel_shuffle pixel_unshuffle channel_shuffle "
    "native_channel_shuffle index tril triu im2col"
)
SPLITS = _words("split split_with_sizes chunk unbind tensor_split")

# What may be computed from constants alone: nothing that is random, that reads files or that can hang.
CONSTANT = _words(
    "add sub mul div neg abs sqrt rsqrt reciprocal exp log pow sum mean amax amin clamp clamp_min clamp_max "
    "maximum minimum cat stack matmul mm bmm full zeros ones arange full_like zeros_like ones_like scalar_tensor "
    "empty_like clone contiguous lift_fresh_copy lift_fresh _to_copy to type_as where eq ne lt le gt ge relu "
    "sigmoid tanh norm linalg_vector_norm square rsub linspace floor floor_divide remainder logical_not "
    "logical_and logical_or sin cos _weight_norm _weight_norm_interface var std softmax _softmax log_softmax eye "
    "new_zeros new_ones new_full"
)
SAME = _words(
    "dropout alpha_dropout feature_dropout feature_alpha_dropout clone contiguous to _to_copy type_as "
    "lift_fresh_copy lift_fresh lift detach_copy"
)

REASONS = {
    "scaled_dot_product_attention": "attention has no Lipschitz constant on all inputs",
    "multi_head_attention_forward": "attention has no Lipschitz constant on all inputs",
    "cond": "control flow that depends on data",
    "while_loop": "control flow that depends on data",
    "embedding": "an embedding of indices",
    "lstm": "a recurrent layer",
    "gru": "a recurrent layer",
    "glu": "a product of two values that both depend on the input",
    "rrelu_with_noise": "a random slope",
    "bernoulli": "random numbers",
    "rand_like": "random numbers",
    "randn_like": "random numbers",
    "native_dropout": "dropout in training mode is random",
    "item": "control flow that depends on data",
}

# Places of an axis that may be resized: a matrix is made for each.
LARGEST_RESIZED = 2**13

_RULES: dict[str, Rule] = {}

_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what some operators do."""

    def register(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return register


class Arguments:
    """The arguments of one call: constants, and :class:`Variable` for what depends on the input."""

    def __init__(self, call: Call, values: dict[str, Any]) -> None:
        self.target, self.values = call.target, values
        self.parts = call.target.split(".")

    @property
    def op(self) -> str:
        """Name without namespace, overload, and the mark of operators that overwrite their input."""
        return self.parts[1].rstrip("_") if len(self.parts) > 1 else self.parts[0]

    @property
    def in_place(self) -> bool:
        """Whether it overwrites its first argument."""
        return len(self.parts) > 1 and self.parts[1].endswith("_") and not self.parts[1].endswith("__")

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that may be left out."""
        value = self.values.get(name, default)
        return default if value is None else value

    def x(self, *names: str) -> Variable:
        """The value it acts on."""
        for name in names or ("self", "input", "x"):
            value = self.values.get(name)
            if isinstance(value, Variable):
                return value
        raise Unknown("a constant where a value that depends on the input was expected")

    def constant(self, name: str) -> Tensor | None:
        """A tensor that does not depend on the input, or ``None``."""
        value = self.values.get(name)
        if isinstance(value, Variable):
            raise Unknown(f"its {name} depends on the input")
        if isinstance(value, _Opaque):
            raise Unknown(f"its {name} is not known: {value.reason}")
        return value if isinstance(value, Tensor) else None

    def weight(self, name: str = "weight") -> Tensor:
        """A tensor that does not depend on the input."""
        value = self.constant(name)
        if value is None:
            raise Unknown(f"without a {name}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.get(name, default)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)):
            raise Unknown(f"its {name} is not a number")
        if not math.isfinite(value):
            raise Unknown(f"its {name} is not finite")
        return float(value)

    def ints(self, name: str, default: Any = None) -> list[int]:
        """Integers."""
        value = self.get(name, default)
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(item, int) for item in values):
            raise Unknown(f"its {name} are not integers")
        return values

    def per_axis(self, name: str, axes: int, default: Any) -> list[int]:
        """One integer per axis."""
        values = self.ints(name, default) or self.ints("", default)
        return values * axes if len(values) == 1 else values


class Translator:
    """Walks through a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.b = Builder()
        self.patterns = Patterns(self.b)
        self._values: dict[str, Any] = dict(program.tensors)
        self._memory = Memory()
        self._types: dict[str, torch.dtype] = {}  # of values that depend on the input, by the names of their nodes

    def run(self, shapes: dict[str, Shape]) -> Graph:
        """The graph for inputs of these shapes."""
        for name, shape in shapes.items():
            self._values[name] = self.b.input(name, shape)
            self._types[self._values[name].name] = self.program.types.get(name, torch.float32)
        for call in self.program.calls:
            values = {name: self._resolve(value) for name, value in call.arguments.items()}
            result = self._result(call, Arguments(call, values))
            for x in _variables(result):
                self._types.setdefault(x.name, self._type_after(values))
            self._bind(call, result)
        for name in self.program.outputs:
            value = self._read(name)
            if isinstance(value, _Opaque):  # it may be random, or overwritten by what depends on the input
                self.b.at(name, "output", [])
                inputs = tuple(self._values[name] for name in shapes)
                value = self.b.unbounded(inputs, (), value.reason)
            self.b.output(name, value)
        return self.b.graph

    def like(self, *values: Any) -> torch.dtype:
        """The type that scalars are rounded to beside these values: float32 also for half precision."""
        types = [self._types.get(x.name, torch.float32) for x in _variables(list(values))]
        return torch.float64 if torch.float64 in types else torch.float32

    def _type_after(self, values: dict[str, Any]) -> torch.dtype:
        """That of a result: as asked for, or promoted from the arguments."""
        wanted = values.get("dtype")
        if isinstance(wanted, torch.dtype) and wanted in rules.REAL:
            return wanted
        types = [self._types.get(x.name, torch.float32) for x in _variables(values)]
        types += [value.dtype for value in values.values() if isinstance(value, Tensor) and value.dim()]
        result = types[0] if types else torch.float32
        for other in types[1:]:
            result = torch.promote_types(result, other)
        return result

    def _result(self, call: Call, arguments: Arguments) -> Any:
        inputs = tuple(_variables(arguments.values))
        if any(isinstance(value, str) and value.startswith("<") for value in arguments.values.values()):
            return self.b.unbounded(inputs, (), f"{arguments.op}: an argument of a kind that is not known")
        self.b.at(call.label, call.target, _constants(arguments.values))
        try:
            if not inputs:
                return self._constant(arguments)
            if call.target == "getitem":
                return arguments.values["a"][arguments.values["b"]]
            return self._translated(arguments)
        except Exception as error:  # whatever a rule stumbles over, the value has no constant
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return self.b.unbounded(inputs, (), f"{arguments.op}: {reason}")

    def _translated(self, arguments: Arguments) -> Any:
        op = arguments.op
        if not arguments.target.startswith("aten."):
            raise Unknown(REASONS.get(op, "an operator that is not torch's own"))
        if op in _RULES:
            return _RULES[op](self, arguments)
        if op in SAME:
            if op.endswith("dropout") and arguments.get("train", False) and arguments.number("p", 0.5) > 0:
                raise Unknown("in training mode it is random; call .eval() first")
            other = arguments.get("other")
            for dtype in (arguments.get("dtype"), other.dtype if isinstance(other, Tensor) else None):
                _require_real(dtype)
            return self.b.same(arguments.x())
        if op in VIEWS | COPIES:
            return self._moved(arguments)
        if op in SPLITS:
            return self._split(arguments)
        if op in activations.PLAIN or op in activations.WITHOUT:
            return rules.activation(self.b, arguments.x(), op)
        raise Unknown(REASONS.get(op, "no rule is known for this operator"))

    def _constant(self, arguments: Arguments) -> Any:
        """What does not depend on the input is computed as torch does, from operators without side effects."""
        if arguments.target == "getitem":
            return arguments.values["a"][arguments.values["b"]]
        if arguments.target in _INTEGERS:  # of sizes that the program leaves open
            values = list(arguments.values.values())
            known = all(isinstance(value, int) for value in values) and len(values) == 2
            return _INTEGERS[arguments.target](*values) if known else _Opaque(f"{arguments.op} of sizes")
        allowed = arguments.op in CONSTANT | VIEWS | COPIES | SPLITS and not arguments.in_place
        if not allowed or not arguments.target.startswith("aten."):
            return _Opaque(f"{arguments.op}: computed from constants by an operator that is not known")
        try:
            return run(arguments.target, arguments.values)
        except Exception as error:  # arguments of a hostile file can make an operator raise anything
            return _Opaque(f"{arguments.op}: {str(error).splitlines()[0][:200] if str(error) else 'failed'}")

    def _moved(self, arguments: Arguments) -> Variable:
        if isinstance(arguments.get("dtype"), torch.dtype):
            raise Unknown("bits that are read as another type")
        x, name = arguments.x(), "self" if "self" in arguments.values else "input"
        if len(_variables(arguments.values)) > 1:
            other = arguments.values.get("other")
            if not isinstance(other, Variable):
                raise Unknown("indices that depend on the input")
            arguments.values["other"] = torch.empty(other.shape, device="meta")
        kind = "pixel shuffle" if "shuffle" in arguments.op else arguments.op.strip("_")
        return self.b.moved(x, lambda places: run(arguments.target, arguments.values | {name: places}), kind)

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
            return _Opaque(reason)
        self.b.at(name, "overwritten", [])
        return self.b.unbounded((value,), value.shape, reason)

    def _bind(self, call: Call, result: Any) -> None:
        several = isinstance(result, (list, tuple)) and len(call.outputs) > 1
        for name, value in zip(call.outputs, result if several else [result], strict=False):
            self._values[name] = value
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
        for argument in written_arguments(call.target, inputs):
            for name in inputs[argument]:
                self._memory.share([name, *call.outputs])
                self._memory.overwrite(name, {name, *call.outputs})
                self._values[name] = self._values[call.outputs[0]]


def _references(value: Any) -> list[str]:
    if isinstance(value, Ref):
        return [value.name]
    return [name for item in value for name in _references(item)] if isinstance(value, (list, tuple)) else []


class _Opaque:
    """A constant that was not computed, for a reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def run(target: str, values: dict[str, Any]) -> Any:
    """An operator of torch by its name, after its result's size was looked at without making it."""
    _, op, overload = target.split(".")
    function = getattr(getattr(torch.ops.aten, op), overload)
    clean = {name: value for name, value in values.items() if name not in ("pin_memory", "layout", "device")}
    takes_device = any(argument.name == "device" for argument in function._schema.arguments)
    planned = function(**_on_meta(clean), **({"device": "meta"} if takes_device else {}))
    total = sum(
        part.numel()
        for part in (planned if isinstance(planned, (list, tuple)) else [planned])
        if isinstance(part, Tensor)
    )
    if total > MOST_ENTRIES:
        raise Unknown(f"a constant of {total} entries")
    return function(**clean)


def _require_real(dtype: Any) -> None:
    if isinstance(dtype, torch.dtype) and dtype not in rules.REAL:
        raise Unknown(f"rounding to {str(dtype).removeprefix('torch.')} jumps")


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_on_meta(item) for item in value]
    return value


def _variables(values: Any) -> list[Variable]:
    if isinstance(values, Variable):
        return [values]
    if isinstance(values, _Opaque):
        return []
    items = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else []
    return [found for item in items for found in _variables(item)]


def _constants(values: Any) -> list[object]:
    """What is left of the arguments without the values that depend on the input."""
    if isinstance(values, (Variable, _Opaque)):
        return []
    if isinstance(values, dict):
        return [found for name in sorted(values) for found in (name, *_constants(values[name]))]
    if isinstance(values, (list, tuple)):
        return [found for item in values for found in _constants(item)]
    return [values]


# Linear layers


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(t: Translator, a: Arguments) -> Variable:
    padding = a.get("padding", 0)
    result = rules.convolution(
        t.b,
        a.x(),
        a.weight(),
        stride=a.get("stride", 1),
        padding=padding,
        dilation=a.get("dilation", 1),
        groups=a.get("groups", 1),
        transposed=a.op.startswith("conv_transpose") or bool(a.get("transposed", False)),
        output_padding=a.get("output_padding", 0),
    )
    return _with_bias(t, a, result)


def _with_bias(t: Translator, a: Arguments, x: Variable) -> Variable:
    """Constants that were added are noted, so that no pattern overlooks them."""
    return x if a.constant("bias") is None else t.patterns.shifted(x, None)


@rule("linear")
def _linear(t: Translator, a: Arguments) -> Variable:
    return _with_bias(t, a, rules.matrix(t.b, a.x(), a.weight()))


@rule("addmm")
def _addmm(t: Translator, a: Arguments) -> Variable:
    if isinstance(a.values["self"], Variable):
        raise Unknown("a bias that depends on the input")
    return t.patterns.shifted(_times_alpha(t, _product(t, a.values["mat1"], a.values["mat2"]), a), None)


@rule("matmul", "mm", "bmm")
def _matmul(t: Translator, a: Arguments) -> Variable:
    return _product(t, a.values["self"], a.get("other", a.get("mat2")))


def _product(t: Translator, first: Any, second: Any) -> Variable:
    if isinstance(first, Variable) and isinstance(second, Variable):
        raise Unknown("a product of two values that both depend on the input")
    if isinstance(first, Variable) and isinstance(second, Tensor) and second.dim() == 2:
        return rules.matrix(t.b, first, second.mT)
    if isinstance(second, Variable) and isinstance(first, Tensor) and first.dim() == 2 and second.dim >= 2:
        return rules.matrix(t.b, second, first, axis=-2)
    raise Unknown("a matrix product with a constant that is not a matrix")


def _times_alpha(t: Translator, x: Variable, a: Arguments) -> Variable:
    alpha = a.number("alpha", 1)
    return x if alpha == 1 else rules.times(t.b, x, alpha, t.like(x))


@rule("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm")
def _batch_norm(t: Translator, a: Arguments) -> Any:
    if a.get("training", False):
        raise Unknown("batch normalisation in training mode mixes the examples of a batch; call .eval() first")
    mean, variance = a.constant("running_mean"), a.constant("running_var")
    result = rules.batch_norm(t.b, a.x(), a.constant("weight"), mean, variance, a.number("eps", 1e-5))
    result = t.patterns.shifted(result, None)
    return result if a.op == "batch_norm" else [result, *_statistics(t, a, 3)]


def _statistics(t: Translator, a: Arguments, count: int) -> list[Variable]:
    """Further results, of which nothing is known."""
    return [t.b.unbounded((a.x(),), (), f"{a.op}: its further results are not followed") for _ in range(count)]


@rule("add", "sub", "rsub")
def _add(t: Translator, a: Arguments) -> Variable:
    first, second = a.values["self"], a.get("other")
    sign = -1 if a.op != "add" else 1
    if a.op == "rsub":
        first, second = second, first
    alpha = a.number("alpha", 1)
    like = t.like(first, second)
    if alpha != 1 and isinstance(second, Variable):
        second = rules.times(t.b, second, alpha, like)
    total = t.patterns.sum(_known(first), _known(second), sign, like)
    return total if alpha == 1 or isinstance(second, Variable) else t.patterns.shifted(total, None)


def _known(value: Any) -> Any:
    if isinstance(value, _Opaque):
        raise Unknown(value.reason)
    return value


@rule("mul")
def _mul(t: Translator, a: Arguments) -> Variable:
    first, second = _known(a.values["self"]), _known(a.values["other"])
    return t.patterns.product(first, second, t.like(first, second))


@rule("div", "true_divide")
def _div(t: Translator, a: Arguments) -> Variable:
    if a.get("rounding_mode") is not None:
        raise Unknown("a division that is rounded jumps")
    first, second = _known(a.values["self"]), _known(a.values["other"])
    return t.patterns.quotient(first, second, t.like(first, second))


@rule("neg")
def _neg(t: Translator, a: Arguments) -> Variable:
    return t.b.scaled(a.x(), -1.0)


@rule("mean", "sum")
def _reduce(t: Translator, a: Arguments) -> Variable:
    axes = a.get("dim", [])
    axes = [axes] if isinstance(axes, int) else axes
    _require_real(a.get("dtype"))
    return rules.reduce_linear(t.b, a.x(), axes, keep=bool(a.get("keepdim", False)), mean=a.op == "mean")


@rule("where")
def _where(t: Translator, a: Arguments) -> Variable:
    condition, first, second = (a.values[name] for name in ("condition", "self", "other"))
    if isinstance(condition, Variable):
        number = _number(first)
        found = None
        if number is not None and isinstance(second, Variable):
            found = t.patterns.guard(condition, number, second)
        if found is None:
            raise Unknown("a choice that depends on the input")
        return found
    terms = []
    for value, mask, other in ((first, condition, second), (second, ~condition, first)):
        if isinstance(value, Variable):
            terms.append((_spread(t, t.b.scaled(value, mask.double()), other), 1))
    return t.b.sum(terms) if len(terms) > 1 else t.patterns.shifted(terms[0][0], None)


def _spread(t: Translator, x: Variable, *others: Any) -> Variable:
    """A value repeated to the shape that it has beside others."""
    shape = tuple(torch.broadcast_shapes(x.shape, *(tuple(getattr(other, "shape", ())) for other in others)))
    return x if shape == x.shape else t.b.moved(x, lambda places: places.expand(shape), "expand")


@rule("masked_fill")
def _masked_fill(t: Translator, a: Arguments) -> Variable:
    a.constant("value")
    return t.patterns.shifted(t.b.scaled(a.x(), (~a.weight("mask")).double()), None)


@rule("eq")
def _eq(t: Translator, a: Arguments) -> Variable:
    if _number(a.values["other"]) != 0:
        raise Unknown("a comparison jumps")
    return t.patterns.zero_test(a.x())


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None


@rule("cat", "concat", "concatenate")
def _cat(t: Translator, a: Arguments) -> Variable:
    return _concatenated(t, a.get("tensors"), a.get("dim", 0))


def _concatenated(t: Translator, parts: list[Any], axis: int) -> Variable:
    result = rules.concatenated(t.b, [_known(part) for part in parts], axis)
    return t.patterns.shifted(result, None) if any(isinstance(part, Tensor) for part in parts) else result


@rule("stack")
def _stack(t: Translator, a: Arguments) -> Variable:
    axis = a.get("dim", 0)
    parts = [
        part.unsqueeze(axis) if isinstance(part, Tensor) else t.b.moved(part, lambda places: places.unsqueeze(axis))
        for part in a.get("tensors")
    ]
    return _concatenated(t, parts, axis)


# Padding, pooling, resizing


@rule(
    "constant_pad_nd",
    "pad",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "_pad_circular",
)
def _pad(t: Translator, a: Arguments) -> Variable:
    amounts = a.ints("pad", a.get("padding"))
    pairs = [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    mode = a.get("mode", "constant")
    for name, known in (("reflect", "reflect"), ("replicat", "replicate"), ("circular", "circular")):
        if a.op.startswith(name) or name in str(mode) or name in a.op:
            return rules.padded(t.b, a.x(), pairs, known)  # type: ignore[arg-type]
    result = rules.padded(t.b, a.x(), pairs, "zeros")
    return t.patterns.shifted(result, None) if a.get("value", 0) else result


@rule(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "max_pool1d_with_indices",
)
def _max_pool(t: Translator, a: Arguments) -> Any:
    axes = int(a.op[8])
    taps = a.per_axis("kernel_size", axes, None)
    stride = a.per_axis("stride", axes, taps) if a.get("stride") else taps
    padding = [(side, side) for side in a.per_axis("padding", axes, 0)]
    dilation = a.per_axis("dilation", axes, 1)
    result = rules.max_pool(t.b, a.x(), taps, stride, padding, dilation, round_up=bool(a.get("ceil_mode", False)))
    return [result, *_statistics(t, a, 1)] if a.op.endswith("indices") else result


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(t: Translator, a: Arguments) -> Variable:
    axes, x = int(a.op[8]), a.x()
    taps = a.per_axis("kernel_size", axes, None)
    stride = a.per_axis("stride", axes, taps) if a.get("stride") else taps
    padding = a.per_axis("padding", axes, 0)
    divisor = a.get("divisor_override")
    matrices = []
    for size, k, s, p in zip(x.shape[-axes:], taps, stride, padding, strict=True):
        counted = bool(a.get("count_include_pad", True))
        round_up = bool(a.get("ceil_mode", False))
        window = rules.average_matrix(size, k, s, p, p, round_up=round_up, count_padding=counted)
        matrices.append((window > 0).double() if divisor else window)
    x = rules.average(t.b, x, matrices)
    return rules.times(t.b, x, float(divisor), torch.float64, divide=True) if divisor else x


@rule(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def _adaptive_avg(t: Translator, a: Arguments) -> Variable:
    axes, x = int(a.op[-2]), a.x()
    outputs = _adaptive_outputs(a, axes, x)
    sizes = x.shape[-axes:]
    return rules.average(t.b, x, [rules.adaptive_matrix(n, m) for n, m in zip(sizes, outputs, strict=True)])


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(t: Translator, a: Arguments) -> Any:
    axes = int(a.op[-2])
    return [rules.adaptive_max(t.b, a.x(), _adaptive_outputs(a, axes, a.x())), *_statistics(t, a, 1)]


def _adaptive_outputs(a: Arguments, axes: int, x: Variable) -> list[int]:
    values = list(a.get("output_size")) if isinstance(a.get("output_size"), (list, tuple)) else [a.get("output_size")]
    values = values * axes if len(values) == 1 else values
    return [size if value is None else value for value, size in zip(values, x.shape[-axes:], strict=True)]


@rule(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
def _upsample(t: Translator, a: Arguments) -> Variable:
    x, axes = a.x(), int(a.op[-2])
    factors = a.get("scale_factors") or [
        scale for name in ("scales", "scales_d", "scales_h", "scales_w") if (scale := a.get(name)) is not None
    ]
    sizes = a.get("output_size") or a.get("size") or [int(n * f) for n, f in zip(x.shape[-axes:], factors, strict=True)]
    if max(*x.shape[-axes:], *sizes) > LARGEST_RESIZED or min(sizes) < 1:
        raise Unknown(f"resizing {x.shape[-axes:]} to {sizes}")
    if "nearest" in a.op:
        return t.b.moved(x, lambda places: _nearest(places, axes, a, t.like(x)), "upsample")
    scales = [float(f) for f in factors] if factors else [None] * axes
    matrices = [
        _interpolation(n, m, scale, "cubic" in a.op, bool(a.get("align_corners", False)))
        for n, m, scale in zip(x.shape[-axes:], sizes, scales, strict=True)
    ]
    return rules.average(t.b, x, matrices, "upsample")


def _nearest(places: Tensor, axes: int, a: Arguments, like: torch.dtype) -> Tensor:
    """Which place each output takes: torch's own operator in the model's type, which rounds, on coordinates."""
    name = "self" if "self" in a.values else "input"
    sizes = places.shape[-axes:]
    for axis, size in enumerate(sizes):
        shape = [size if other == axis else 1 for other in range(axes)]
        coordinate = torch.arange(size, dtype=like).reshape(1, 1, *shape).expand(1, 1, *sizes).contiguous()
        chosen = run(a.target, a.values | {name: coordinate}).movedim(2 + axis, -1)[(0, 0, *(0,) * (axes - 1))]
        places = places.index_select(places.dim() - axes + axis, chosen.long())
    return places


def _interpolation(size: int, outputs: int, scale: float | None, cubic: bool, align: bool) -> Tensor:
    """The matrix along one axis, by torch's own operator on the unit vectors of that axis."""
    unit = torch.eye(size, dtype=torch.float64)[:, None, :, None]
    arguments = {"self": unit, "output_size": [outputs, 1], "scales_h": scale}
    name = "aten.upsample_bicubic2d.default" if cubic else "aten.upsample_bilinear2d.default"
    return run(name, arguments | {"align_corners": align})[:, 0, :, 0].T.contiguous()  # type: ignore[no-any-return]


# Activations


@rule("leaky_relu")
def _leaky(t: Translator, a: Arguments) -> Variable:
    return rules.activation(t.b, a.x(), "leaky_relu", activations.leaky(a.number("negative_slope", 0.01)))


@rule("rrelu")
def _rrelu(t: Translator, a: Arguments) -> Variable:
    if a.get("training", False):
        raise Unknown("in training mode its slope is random; call .eval() first")
    slope = (a.number("lower", 1 / 8) + a.number("upper", 1 / 3)) / 2
    return rules.activation(t.b, a.x(), "rrelu", activations.leaky(slope))


@rule("elu", "selu", "celu")
def _elu(t: Translator, a: Arguments) -> Variable:
    if a.op == "celu":
        return rules.activation(t.b, a.x(), "celu", activations.celu(a.number("alpha", 1.0)) or "its alpha is negative")
    if a.op == "selu":
        slopes = activations.elu(1.6732632423543772, 1.0507009873554805)
    else:
        slopes = activations.elu(a.number("alpha", 1), a.number("scale", 1), a.number("input_scale", 1))
    return rules.activation(t.b, a.x(), a.op, slopes or "its slope grows")


@rule("softplus")
def _softplus(t: Translator, a: Arguments) -> Variable:
    beta = a.number("beta", 1)
    name = "softplus" if beta == 1 else "softplus with beta"  # which is no part of Mish
    return rules.activation(t.b, a.x(), name, activations.softplus(beta, a.number("threshold", 20)))


@rule("gelu")
def _gelu(t: Translator, a: Arguments) -> Variable:
    name = "gelu_tanh" if a.get("approximate", "none") == "tanh" else "gelu"
    return rules.activation(t.b, a.x(), name)


@rule("prelu", "_prelu_kernel")
def _prelu(t: Translator, a: Arguments) -> Variable:
    return rules.prelu(t.b, a.x(), a.weight())


@rule("hardtanh", "clamp", "clamp_min", "clamp_max", "relu6")
def _clamp(t: Translator, a: Arguments) -> Variable:
    if any(isinstance(value, Variable) for name, value in a.values.items() if name != "self"):
        raise Unknown("bounds that depend on the input")
    bounds = [_known(value) for name, value in a.values.items() if name != "self"]
    return rules.activation(t.b, _spread(t, a.x(), *bounds), "clamp")


@rule("threshold")
def _threshold(t: Translator, a: Arguments) -> Variable:
    is_continuous = a.number("threshold", 0) == a.number("value", 0)
    return rules.activation(t.b, a.x(), "threshold", (0.0, 1.0) if is_continuous else None)


@rule("sign", "sgn")
def _sign(t: Translator, a: Arguments) -> Variable:
    return t.b.unbounded((a.x(),), a.x().shape, SIGN)


@rule("pow", "square")
def _pow(t: Translator, a: Arguments) -> Variable:
    exponent = 2.0 if a.op == "square" else _number(a.values["exponent"])
    if exponent == 2:
        return t.b.unbounded((a.x(),), a.x().shape, SQUARE)
    if exponent == 0.5:
        return t.patterns.root(a.x())
    if exponent == 1:
        return t.b.same(a.x())
    return rules.activation(t.b, a.x(), "pow")


@rule("sqrt")
def _sqrt(t: Translator, a: Arguments) -> Variable:
    return t.patterns.root(a.x())


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def _softmax(t: Translator, a: Arguments) -> Variable:
    return rules.softmax(t.b, a.x(), a.get("dim", -1), log="log" in a.op)


@rule("maximum", "minimum", "max", "min")
def _extremum(t: Translator, a: Arguments) -> Any:
    name = "maximum" if a.op.startswith("max") else "minimum"
    if a.values.get("other") is None:
        return _largest(t, a)
    first, second = a.values["self"], a.values["other"]
    if isinstance(first, Variable) and isinstance(second, Variable):
        return rules.extremum(t.b, first, second, name)
    x, constant = (first, second) if isinstance(first, Variable) else (second, first)
    if not isinstance(constant, Tensor):
        raise Unknown("the constant was not computed")
    return rules.activation(t.b, _spread(t, x, constant), "clamp")


@rule("amax", "amin")
def _largest(t: Translator, a: Arguments) -> Any:
    """The largest entry along some axes: no further from each other than the entries."""
    x, axes = a.x(), a.get("dim", [])
    axes = [axis % x.dim for axis in ([axes] if isinstance(axes, int) else axes)] or list(range(x.dim))
    keep = bool(a.get("keepdim", False))
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes)
    result = t.b.nonlinear(x, Nonlinear(1.0, "largest entry", why="entries occur once"), shape)
    return [result, *_statistics(t, a, 1)] if a.parts[-1] == "dim" else result


@rule("sort", "msort")
def _sort(t: Translator, a: Arguments) -> Any:
    result = t.b.nonlinear(a.x(), Nonlinear(1.0, "sort", why="a permutation of its input"))
    return [result, *_statistics(t, a, 1)] if a.op == "sort" else result


@rule("linalg_vector_norm", "norm")
def _norm(t: Translator, a: Arguments) -> Variable:
    order = _number(a.get("ord", a.get("p", 2)))
    if order != 2:
        raise Unknown(f"a norm of order {order}")
    x, axes = a.x(), a.get("dim", [])
    axes = [axis % x.dim for axis in ([axes] if isinstance(axes, int) else axes)] or list(range(x.dim))
    keep = bool(a.get("keepdim", False))
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes)
    return t.b.nonlinear(x, Nonlinear(1.0, "l2 norm", why="a norm of disjoint parts"), shape)


# Normalisation


@rule("layer_norm", "native_layer_norm")
def _layer_norm(t: Translator, a: Arguments) -> Any:
    shape = a.ints("normalized_shape")
    x = rules.normalised(t.b, a.x(), math.prod(shape), a.number("eps", 1e-5), t.like(a.x()), "layer norm")
    weight = a.constant("weight")
    x = _with_bias(t, a, x if weight is None else t.b.scaled(x, rules.exact(weight)))
    return [x, *_statistics(t, a, 2)] if a.op.startswith("native") else x


@rule("rms_norm")
def _rms_norm(t: Translator, a: Arguments) -> Variable:
    like = t.like(a.x())
    epsilon = a.number("eps", torch.finfo(like).eps)
    x = rules.normalised(t.b, a.x(), math.prod(a.ints("normalized_shape")), epsilon, like, "rms norm")
    weight = a.constant("weight")
    return x if weight is None else t.b.scaled(x, rules.exact(weight))


@rule("instance_norm", "group_norm", "native_group_norm")
def _group_norm(t: Translator, a: Arguments) -> Any:
    x = a.x()
    if a.op == "instance_norm" and not a.get("use_input_stats", True):
        statistics = a.constant("running_mean"), a.constant("running_var")
        y = rules.batch_norm(t.b, x, a.constant("weight"), *statistics, a.number("eps", 1e-5))
        return t.patterns.shifted(y, None)
    groups = x.shape[1] if a.op == "instance_norm" else a.get("num_groups", a.get("group", 1))
    count = math.prod(x.shape[1:]) // groups
    name = a.op.removeprefix("native_").replace("_", " ")
    y = rules.normalised(t.b, x, count, a.number("eps", 1e-5), t.like(x), name)
    weight = a.constant("weight")
    y = y if weight is None else t.b.scaled(y, rules.exact(weight).reshape(-1, *(1,) * (x.dim - 2)))
    y = _with_bias(t, a, y)
    return [y, *_statistics(t, a, 2)] if a.op.startswith("native") else y


@rule("sym_size", "sym_numel")
def _size(t: Translator, a: Arguments) -> int:
    x = a.x()
    return x.shape[a.get("dim")] if a.op == "sym_size" else math.prod(x.shape)


# Operators whose results are new, also where torch makes them of others that may not be.
FRESH = set(_RULES) | set(activations.PLAIN)
