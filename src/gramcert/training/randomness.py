"""Random numbers that depend on nothing but a seed and what they are for.

No generator has a state that a resumed run would have to restore, and processes that share a batch draw the same.
"""

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator of its own for each purpose, such as ``("order", epoch)``."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
