"""Factorisations block by block, forced on matrices of any order."""

from contextlib import contextmanager

import pytest


@contextmanager
def in_blocks(force=True):
    with pytest.MonkeyPatch.context() as patch:
        if force:
            for name, value in (("SMALLEST", 1), ("BLOCK", 2), ("PANEL", 8), ("ROWS", 4)):
                patch.setattr(f"gramcert.certified.factorisation.{name}", value)
        yield
