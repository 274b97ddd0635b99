"""``projection``: weights brought back into the set of those with a small norm, after steps of an optimiser."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from gramcert.arguments import Sizes
from gramcert.geometry.convolution import LAYERS
from gramcert.projecting.project import Projection

CALL = "projection"


def projection(
    optimizer: torch.optim.Optimizer,
    layers: Iterable[nn.Module],
    every: int = 1,
    norm: float = 1.0,
    *,
    input_size: Sizes | None = None,
    steps: int = 8,
    tol: float = 1e-2,
    max_bytes: int = 2**31,
) -> RemovableHandle:
    """Project the weights of layers after every so many steps of an optimiser: projected gradient descent.

    Weights are projected at once, then after steps ``every``, ``2·every``, ... in place: parameters stay the same
    objects, and what the optimiser keeps of them is left alone. Each is :func:`gramcert.project` with few steps of
    search and a coarse proof, so that training stays quick; what was projected is proved all the same. Between two
    projections norms may be larger: with ``every > 1`` call :func:`gramcert.project` once more after training.

    Args:
        optimizer: any optimiser of torch.
        layers: ``nn.Linear``, ``nn.Conv1d/2d/3d`` and ``nn.ConvTranspose1d/2d/3d`` whose weights it trains.
        every: how many steps there are between two projections.
        norm: what each norm may be at most.
        input_size: the one size that all of these layers are used at, or ``None`` for every size.
        steps: most steps of each search.
        tol: relative width of each proof. A weight that is projected again and again stays up to that far inside.
        max_bytes: most memory of each proof.

    Returns:
        A handle; ``handle.remove()`` ends it.

    Example:
        >>> import torch, gramcert
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.Conv2d(4, 4, 3, padding=1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        >>> handle = gramcert.projection(optimizer, [layer])
        >>> (-layer(torch.randn(8, 4, 16, 16)).square().mean()).backward()
        >>> optimizer.step()
        >>> gramcert.spectral_norm(layer, tol=1e-2).upper <= 1
        True
        >>> handle.remove()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{CALL}(optimizer): expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"{CALL}(every): expected an int, got {every!r}")
    if every < 1:
        raise ValueError(f"{CALL}(every={every}): expected at least 1")
    chosen = _checked_layers(optimizer, layers)
    project = Projection(CALL, norm, steps, tol, max_bytes)
    taken = 0

    def bring_back() -> None:
        with torch.no_grad():
            for layer, weight in chosen:
                weight.copy_(project(layer, input_size))

    def after_step(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken % every == 0:
            bring_back()

    bring_back()
    return optimizer.register_step_post_hook(after_step)


def _checked_layers(optimizer: torch.optim.Optimizer, layers: Iterable[nn.Module]) -> list[tuple[nn.Module, Tensor]]:
    """The layers with their weights, if the optimiser is what changes these, and each is there once."""
    if isinstance(layers, (nn.Linear, *LAYERS)) or not isinstance(layers, Iterable):
        raise TypeError(f"{CALL}(layers): expected a sequence of layers, got {type(layers).__name__}")
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    result: list[tuple[nn.Module, Tensor]] = []
    seen: set[int] = set()
    for place, layer in enumerate(layers):
        name = f"{CALL}(layers[{place}])"
        if not isinstance(layer, (nn.Linear, *LAYERS)):
            expected = "Linear or a Conv or ConvTranspose layer, 1-D to 3-D"
            raise TypeError(f"{name}: expected {expected}, got {type(layer).__name__}")
        if parametrize.is_parametrized(layer):
            raise ValueError(
                f"{name}: its weight is computed by a parametrisation, so that nothing can be written to it"
            )
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if id(weight) not in trained:
            raise ValueError(f"{name}: its weight is not among the parameters of the optimizer")
        if id(weight) in seen:
            raise ValueError(f"{name}: its weight is that of an earlier layer; expected each weight once")
        seen.add(id(weight))
        result.append((layer, weight))
    if not result:
        raise ValueError(f"{CALL}(layers): expected at least one layer, got none")
    return result
