"""A tiny network of digits, trained once for all tests that need one."""

import functools
import tempfile
from pathlib import Path

from gramcert.training.checkpoints import MODEL
from gramcert.training.configuration import named
from gramcert.training.images import load_images
from gramcert.training.loop import train

FIELDS = {"widths": "4", "blocks": "1", "inner": "4", "dense_blocks": "1", "dense_inner": "16", "epochs": "2"}


@functools.cache
def _trained():
    with tempfile.TemporaryDirectory() as folder:
        train(named("digits").with_fields(FIELDS), load_images("digits", None), Path(folder) / "run")
        return (Path(folder) / "run" / MODEL).read_bytes()


def trained_copy(folder):
    """A new folder with the finished network."""
    folder.mkdir()
    (folder / MODEL).write_bytes(_trained())
    return folder
