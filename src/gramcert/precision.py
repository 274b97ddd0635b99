"""Full precision of float32 products while proofs run.

How precise they are is a setting of the whole process, so threads have to agree: the first one to enter raises it, the
last one to leave puts it back, as it was.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# "none" is torch's word for the default, which is full precision.
_FULL = ("ieee", "none")

_lock = threading.Lock()
_inside = 0
_put_back: Callable[[], None] = lambda: None  # noqa: E731 - replaced by whoever enters first


def _forget() -> None:
    """In a process that was forked nobody is inside, and nobody holds the lock."""
    global _lock, _inside
    _lock, _inside = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def full_float32_products(call: str) -> Iterator[None]:
    """No TF32 and no bfloat16 inside; a change by somebody else in the meantime is an error."""
    global _inside, _put_back
    with _lock:
        if not _inside:
            _put_back = _raised()
        _inside += 1
    changed = False
    try:
        yield
    finally:
        with _lock:
            _inside = max(0, _inside - 1)  # a fork inside has forgotten
            changed = _setting() not in _FULL
            if not _inside and not changed:
                _put_back()
    if changed:
        raise RuntimeError(
            f"{call}: the precision of float32 products was set to {_setting()!r} while it ran, so nothing is proved"
        )


def _setting() -> str:
    library: Any = torch.backends.mkldnn
    return str(library.matmul.fp32_precision)


def _raised() -> Callable[[], None]:
    """Raise the precision if need be, and say how to put it back."""
    library: Any = torch.backends.mkldnn
    before = _setting()
    if before in _FULL:
        return lambda: None
    own = "none" if _is_inherited() else before
    library.matmul.fp32_precision = "ieee"
    return lambda: setattr(library.matmul, "fp32_precision", own)


def _is_inherited() -> bool:
    """Whether products follow the setting of their library, or of all libraries.

    Torch tells which value holds, but not whose it is; so look what follows when the others are raised.
    """
    everything: Any = torch.backends
    library: Any = torch.backends.mkldnn
    whole, value = everything.fp32_precision, library.fp32_precision
    if library.matmul.fp32_precision != value:
        return False
    everything.fp32_precision = "ieee"
    own = "none" if library.fp32_precision == "ieee" else value
    library.fp32_precision = "ieee"
    follows = library.matmul.fp32_precision == "ieee"
    library.fp32_precision = own
    everything.fp32_precision = whole  # last: some versions keep both in one place
    return bool(follows)
