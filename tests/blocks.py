"""Factorisations block by block, forced on matrices of any order."""

from contextlib import contextmanager

import pytest


@contextmanager
def in_blocks(force=True):
    with pytest.MonkeyPatch.context() as patch:
        if force:
            for name, value in (
                ("staircase.SMALLEST", 1),
                ("staircase.PANEL", 8),
                ("factorisation.BLOCK", 2),
                ("factorisation.ROWS", 4),
            ):
                patch.setattr(f"gramcert.certified.{name}", value)
        yield
