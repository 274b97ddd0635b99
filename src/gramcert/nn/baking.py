"""``export`` and ``frozen``: copies of a model with the rescaled weights as they are now."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import nn
from torch.nn.utils import parametrize

from gramcert.geometry.recognition import faithful_copy, is_genuine, require_known, require_steady
from gramcert.nn.dense import SRConv1d, SRConv2d, SRConv3d, SRLinear
from gramcert.nn.head import NormalizedLinear

_BASES: dict[type[nn.Module], type[nn.Module]] = {
    SRLinear: nn.Linear,
    NormalizedLinear: nn.Linear,
    SRConv1d: nn.Conv1d,
    SRConv2d: nn.Conv2d,
    SRConv3d: nn.Conv3d,
}


@runtime_checkable
class Exportable(Protocol):
    """A layer that can say itself in torch's own layers."""

    def plain(self) -> nn.Module:
        """The same function without this package."""


def export(model: nn.Module) -> nn.Module:
    """The same function without this package: every parametrised weight baked in, every layer one of torch's.

    The model itself is left alone. The copy is in evaluation mode, has torch's layers and graphs of them
    (``torch.fx.GraphModule``), and can go to ``torch.export``, ONNX or a file. Modules of your own keep their class,
    with their parts replaced.

    Example:
        >>> import torch, gramcert
        >>> model = torch.nn.Sequential(gramcert.nn.SRConv2d(1, 4, 3, padding=1), gramcert.nn.MaxMin())
        >>> plain = gramcert.nn.export(model)
        >>> plain[0]
        Conv2d(1, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
        >>> x = torch.ones(1, 1, 5, 5)
        >>> torch.equal(plain(x), model(x))
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"export(model): expected a torch.nn.Module, got {type(model).__name__}")
    return _replaced("export", faithful_copy("export", model).eval(), {}, _plain)


def frozen_copy(call: str, model: nn.Module) -> nn.Module:
    """A copy in which parametrised weights are plain tensors, each computed once; nothing else is changed.

    A parametrisation may give other weights each time. Torch's own ``parametrize.cached`` cannot be used against that:
    it takes a layer and its deep copies for one, and gives all of them the weights of whichever was asked first.
    """
    return _replaced(call, faithful_copy(call, model), {}, lambda call, module: module)


def plain_copy(call: str, model: nn.Module) -> nn.Module:
    """What :func:`export` gives, in the mode, training or evaluation, that the model is in."""
    return _replaced(call, faithful_copy(call, model), {}, _plain)


def _replaced(
    call: str, module: nn.Module, done: dict[nn.Module, nn.Module], change: Callable[[str, nn.Module], nn.Module]
) -> nn.Module:
    """A module with its weights baked in and its parts replaced, then changed; one that occurs twice stays one."""
    if module in done:
        return done[module]
    require_steady(call, module)
    baked = _baked(module) if parametrize.is_parametrized(module) else module
    for name, child in list(baked._modules.items()):
        if child is not None:
            setattr(baked, name, _replaced(call, child, done, change))
    done[module] = change(call, baked)
    return done[module]


def _plain(call: str, module: nn.Module) -> nn.Module:
    """A layer of this package in torch's operations, others as they are, and so those that hooks or a user changed."""
    if not is_genuine(type(module), "gramcert") or not isinstance(module, Exportable):
        return module
    try:
        require_known("export", module, type(module))
    except TypeError:
        return module
    try:
        return module.plain().eval()
    except ValueError as error:
        raise ValueError(f"{call}({type(module).__name__}): {error}") from None


def _baked(module: nn.Module) -> nn.Module:
    """A module of the class it had before torch parametrised it, with the weights that it uses.

    Not by ``remove_parametrizations``: a copy shares its class with the original, which would lose its weights with it.
    """
    kind = type(module).__bases__[0]
    kind = _BASES.get(kind, kind)
    baked = kind.__new__(kind)
    nn.Module.__init__(baked)
    kept = {name: part for name, part in module._modules.items() if name != "parametrizations"}
    baked.__dict__.update(module.__dict__ | {"_modules": kept, "_parameters": dict(module._parameters)})
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    for name, parts in parametrizations.items():
        value = parts().detach().clone()  # not the attribute, which may come out of torch's cache
        originals = list(parts.parameters(recurse=False))  # several where a weight is made of several
        if originals:
            trained = any(original.requires_grad for original in originals)
            baked.register_parameter(name, nn.Parameter(value, requires_grad=trained))
        else:
            baked.register_buffer(name, value)
    return baked
