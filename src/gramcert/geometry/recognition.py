"""Whether a layer computes what its class is known for: nothing overridden, replaced, hooked or patched.

Everything certified about a layer rests on its class. A method may come from any class of the method resolution order,
from the instance, from a hook, or from somebody who patched the class itself, so each of these is looked at. What
cannot be seen from a layer, such as a patched ``torch.nn.functional``, is listed in ``docs/what-is-certified.md``.
"""

import contextlib
import copy
import dis
import functools
import inspect
import random
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize

from gramcert.arguments import COMPLEX_TYPES, REAL_TYPES, require_finite

# What a subclass may define without changing what the layer computes.
_HARMLESS = {
    *("__init__", "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__annotations__"),
    *("__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__orig_bases__"),
    *("__parameters__", "__class_getitem__", "__init_subclass__", "__subclasshook__", "__abstractmethods__"),
    *("_abc_impl", "__constants__", "__repr__", "__str__", "__dir__", "__hash__", "__eq__", "__ne__", "_get_name"),
    *("extra_repr", "reset_parameters"),
}

# Through these torch calls the forward of every layer, and finds its weights.
_CALLING = frozenset(("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward", "forward", "__getattr__"))

# By these a class says itself what a copy of it is; by the others, what is kept in one.
_COPYING = ("__deepcopy__", "__reduce__", "__reduce_ex__")
_HARMLESS |= {*_COPYING, "__getstate__", "__setstate__"}  # for what is computed

# Where torch keeps what a layer is made of.
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")

# Instructions that look an attribute up, in the versions of Python.
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")

# Modules of torch whose hooks make weights.
_HIDING = {f"torch.nn.utils.{name}": name for name in ("weight_norm", "spectral_norm")}

_FLOATS = (*REAL_TYPES, *COMPLEX_TYPES, torch.float16, torch.bfloat16)

_PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)


def require_known(call: str, layer: nn.Module, base: type[nn.Module], hint: str = "") -> None:
    """Refuse layers that may compute something else than their class ``base`` does, or that have no weights yet."""
    name = type(layer).__name__
    _require_weights(call, layer)
    if not torch.compiler.is_compiling():
        _require_known_methods(call, layer, base, hint)
        _require_plain_tensors(call, layer)
    elif getattr(layer.forward, "__func__", None) is not base.forward:  # the rest cannot be compiled
        raise TypeError(f"{call}({name}): it overrides {base.__name__}.forward, so what it computes is unknown{hint}")
    _require_nothing_replaced(call, layer)
    require_no_hidden_weight(call, layer)
    everywhere = [getattr(nn.modules.module, f"_global_forward_{kind}", {}) for kind in ("pre_hooks", "hooks")]
    hooks = [hook for hooks in (layer._forward_pre_hooks, layer._forward_hooks, *everywhere) for hook in hooks.values()]
    if hooks:
        hook = getattr(hooks[0], "__name__", type(hooks[0]).__name__)
        raise TypeError(
            f"{call}({name}): its hook {hook} may change the weight or the output; remove hooks, or use "
            f"torch.nn.utils.parametrizations, whose effective weight is known"
        )


def _require_weights(call: str, layer: nn.Module) -> None:
    """Refuse a lazy layer that has not seen an input."""
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise ValueError(f"{call}({type(layer).__name__}): the layer has no weights yet; run it once on an input first")


def require_no_hidden_weight(call: str, layer: nn.Module) -> None:
    """Refuse layers whose weight is made by a hook of torch's older functions, and say what to do."""
    for hook in layer._forward_pre_hooks.values():
        name = _HIDING.get(type(hook).__module__)
        if name is not None:
            raise TypeError(
                f"{call}({type(layer).__name__}): torch.nn.utils.{name} makes its weight in a hook; call "
                f"torch.nn.utils.remove_{name}(layer) first, or use torch.nn.utils.parametrizations.{name} instead"
            )


def require_code(call: str, module: nn.Module) -> None:
    """Refuse TorchScript, which says it is torch's own layers and holds code that is not looked into."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{call}({module.original_name}): TorchScript is not read; give the module that it was made from, or that "
            "module as a .pt2 of torch.export or as ONNX to audit"
        )


def _require_nothing_replaced(call: str, layer: nn.Module, but: str = "") -> None:
    """Refuse methods set on an instance, and tables of torch that are no plain dictionaries any more."""
    known = [attribute for attribute in vars(layer) if inspect.isfunction(getattr(type(layer), attribute, None))]
    odd = [table for table in _TABLES if type(vars(layer)[table]) not in (dict, OrderedDict)]
    replaced = [attribute for attribute in (*known, *odd) if attribute != but]
    if replaced:
        name = type(layer).__name__
        raise TypeError(f"{call}({name}): its {replaced[0]} was replaced, so what it computes is unknown")


def _require_known_methods(call: str, layer: nn.Module, base: type[nn.Module], hint: str) -> None:
    """Every name that the known classes use has to come from one of them, as it was written there."""
    kinds, name = type(layer).__mro__, type(layer).__name__
    if base not in kinds:  # __class__ can say anything
        raise TypeError(f"{call}({name}): it is no {base.__name__}, so what it computes is unknown")
    known = {kind for kind in kinds if kind in base.__mro__ or is_genuine(kind, "gramcert")}
    made = _made_by_parametrize(layer)
    names = set(_CALLING | {"__getattribute__"}).union(*(_used_names(kind) for kind in known))
    for kind in kinds:
        found = names & vars(kind).keys()
        names -= found  # what comes first in the order wins
        if kind is made:
            found -= _parametrizations(layer).keys()
        elif kind in known:
            found = {attribute for attribute in found if _is_patched(kind, attribute)}
        if found:
            what = "was patched at" if kind in known else "overrides"
            listed = ", ".join(sorted(found))
            raise TypeError(f"{call}({name}): {kind.__name__} {what} {listed}, so what it computes is unknown{hint}")
    compiled = vars(layer).get("_compiled_call_impl")
    if compiled is not None and _compiled_from(compiled) != layer._call_impl:
        raise TypeError(f"{call}({name}): its _compiled_call_impl was replaced, so what it computes is unknown")


@functools.cache
def _used_names(kind: type) -> frozenset[str]:
    """What a class defines, and every attribute that its functions mention: no other can change what they compute."""
    if kind in (nn.Module, object):  # whose other methods do not compute anything
        return frozenset()
    names = set(vars(kind))
    codes = [value.__code__ for value in vars(kind).values() if inspect.isfunction(value)]
    while codes:
        code = codes.pop()
        names.update(step.argval for step in dis.get_instructions(code) if step.opname in _ATTRIBUTES)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return frozenset(names - _HARMLESS)


def is_genuine(kind: type, package: str) -> bool:
    """Whether a class is one of a package, found there under its name."""
    if kind.__module__.partition(".")[0] != package:
        return False
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind


def _is_patched(kind: type, name: str) -> bool:
    """Whether a function of a class of torch, or of this package, is not the one that stands in its source."""
    if not (is_genuine(kind, "torch") or is_genuine(kind, "gramcert")):
        return False
    found = _function(vars(kind)[name])
    if not inspect.isfunction(found):
        # Constants are no methods; what can be called or bound in place of one is.
        return callable(found) or hasattr(type(found), "__get__") or name in _CALLING
    if found.__globals__ is vars(contextlib) and name not in _CALLING:  # @contextmanager
        return False
    if found.__globals__ is not vars(sys.modules[kind.__module__]):
        return True
    if name == "forward" and kind is nn.Module:  # not implemented
        return False
    where, _, written = found.__code__.co_qualname.rpartition(".")
    return where != kind.__qualname__ or _function(vars(kind).get(written)) is not found  # one has an alias


def _function(value: Any) -> Any:
    """What is called by a method of any kind, or by a property."""
    return getattr(value, "fget", None) or getattr(value, "__func__", None) or value


def _made_by_parametrize(layer: nn.Module) -> type | None:
    """The class that torch made for a parametrised layer: a property for each tensor, and how it is copied."""
    kind = type(layer)
    if not parametrize.is_parametrized(layer):
        return None
    found = [_function(value) for value in vars(kind).values()]
    at_home = all(
        getattr(value, "__globals__", None) is vars(parametrize)
        for value in found
        if callable(value) or hasattr(type(value), "__get__")
    )
    return kind if at_home else None


def _parametrizations(layer: nn.Module) -> dict[str, parametrize.ParametrizationList]:
    """Of each parametrised tensor, by its name."""
    found = getattr(layer, "parametrizations", None) if parametrize.is_parametrized(layer) else None
    return dict(found.items()) if isinstance(found, nn.ModuleDict) else {}  # type: ignore[arg-type]


def _compiled_from(function: Any) -> object:
    """What torch.compile was given, if it made this function; otherwise ``None``."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith("torch._dynamo."):
        function = getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "__wrapped__", None)
        if getattr(function, "__self__", None) is not None or isinstance(function, nn.Module):
            return function
    return None


def _require_plain_tensors(call: str, layer: nn.Module) -> None:
    """A subclass of Tensor may compute anything under the name of any operation."""
    kind = type(layer).__name__
    for name, value in (*layer._parameters.items(), *layer._buffers.items(), *vars(layer).items()):
        if isinstance(value, Tensor):
            require_plain_tensor(f"{call}({kind}.{name})", value)
            dense = value.layout == torch.strided and not value.is_meta
            if name != "weight" and dense and value.dtype in _FLOATS:  # weights are looked at by whoever bounds them
                require_finite(call, f"{kind}.{name}", value)


def require_plain_tensor(name: str, tensor: Tensor) -> None:
    """Refuse subclasses of Tensor, and tensors with methods of their own."""
    if type(tensor) not in _PLAIN_TENSORS:
        raise TypeError(f"{name}: expected a torch.Tensor, got its subclass {type(tensor).__name__}")
    own = [attribute for attribute in vars(tensor) if callable(getattr(Tensor, attribute, None))]
    if own:
        raise TypeError(f"{name}: its {own[0]} was replaced, so what it computes is unknown")


def faithful_copy(call: str, model: nn.Module) -> nn.Module:
    """A deep copy, part for part and bit for bit; a model whose copy may be something else is refused."""
    for part in model.modules():
        require_code(call, part)
        _require_weights(call, part)
        kinds = [kind for kind in type(part).__mro__ if kind is not object and kind is not _made_by_parametrize(part)]
        own = [kind for kind in kinds if not (is_genuine(kind, "torch") or is_genuine(kind, "gramcert"))]
        found = [name for name in _COPYING if name in vars(part) or any(name in vars(kind) for kind in own)]
        if found:
            kind = type(part).__name__
            raise TypeError(f"{call}({kind}): it overrides {found[0]}, so a copy of it may be something else")
    try:
        copied = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # tensors with a history, locks, open files
        for part in model.modules():
            require_no_hidden_weight(call, part)
        raise TypeError(f"{call}(model): it cannot be copied ({str(error).splitlines()[0]})") from None
    parts = list(copied.named_modules())
    if len(parts) != len(list(model.named_modules())):
        raise TypeError(f"{call}({type(model).__name__}): a copy of it is something else")
    for (path, one), (other, two) in zip(model.named_modules(), parts, strict=True):
        tensors = [{**part._parameters, **part._buffers} for part in (one, two)]
        same = all(_same_bits(value, tensors[1].get(name)) for name, value in tensors[0].items())
        facts = [(_class(part), found.keys()) for part, found in zip((one, two), tensors, strict=True)]
        if path != other or facts[0] != facts[1] or not same:
            raise TypeError(f"{call}({type(one).__name__}): a copy of {path or 'it'} is something else")
    return copied


def _class(part: nn.Module) -> object:
    """Its class; of a traced graph, for each of which torch makes one, its code."""
    return part.code if isinstance(part, torch.fx.GraphModule) else type(part)


def _same_bits(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if type(one) is not type(two) or one.dtype != two.dtype or one.shape != two.shape:
        return False
    plain = one.layout == torch.strided and not one.is_meta
    return not plain or bool(((one == two) | (one.isnan() & two.isnan())).all())


def unwrapped(call: str, module: nn.Module) -> nn.Module:
    """What wrappers of torch itself call: those of torch.compile (whose class takes a second to import) and DDP."""
    require_code(call, module)
    kind = type(module)
    if kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo."):
        _require_nothing_replaced(call, module, but="forward")
        inner = getattr(module, "_orig_mod", None)
        hooked = vars(module)["_forward_hooks"] or vars(module)["_forward_pre_hooks"]
        if hooked or vars(module).get("_compiled_call_impl") is not None:
            raise TypeError(f"{call}({kind.__name__}): it has hooks, so what it computes is unknown")
        target = _compiled_from(vars(module).get("forward"))
        if isinstance(inner, nn.Module) and (target is inner or getattr(target, "__self__", None) is inner):
            return unwrapped(call, inner)
        raise TypeError(f"{call}({kind.__name__}): its forward was replaced, so what it computes is unknown")
    if kind in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        require_known(call, module, kind)
        return unwrapped(call, module.module)  # type: ignore[arg-type]
    return module


class UnsteadyWeightError(ValueError):
    """A parametrised layer that has no weight to speak of."""


def require_steady(call: str, layer: nn.Module) -> None:
    """Refuse a layer whose parametrisations draw random numbers or give another weight each time.

    Dropout of weights does the one in training mode, torch's spectral_norm the other. Those of this package do neither.
    """
    name, lists = type(layer).__name__, _parametrizations(layer)
    for parameter, parts in lists.items():
        require_known(call, parts, parametrize.ParametrizationList)
        ours = [part for part in parts if is_genuine(type(part), "gramcert")]
        for part in ours:
            require_known(call, part, type(part))
        if len(ours) == len(parts):
            continue
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before, of_torch = random_state(), torch.get_rng_state()
            first = parts().clone()
            require_plain_tensor(f"{call}({name}.{parameter})", first)
            drawn = random_state() != before or not torch.equal(torch.get_rng_state(), of_torch)
            if drawn or not torch.equal(first, parts()):
                raise UnsteadyWeightError(
                    f"{call}({name}): its parametrisation of {parameter} gives another one each time; "
                    f"call .eval() first, if that stops it"
                )


def random_state() -> object:
    """Of the generators that Python and NumPy share among all who draw without one of their own."""
    return random.getstate(), repr(np.random.get_state(legacy=False))  # noqa: NPY002 - only looked at
