import pytest
import torch

from gramcert.training.configuration import named
from gramcert.training.images import load_images

TINY = {
    "widths": "4",
    "blocks": "1",
    "inner": "4",
    "dense_blocks": "1",
    "dense_inner": "8",
    "epochs": "2",
    "images": "256",
    "batch": "64",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As the processes have that are started here: sums of several threads may be rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits():
    return load_images("digits", None)


@pytest.fixture(scope="session")
def tiny():
    """The configuration of a run of eight steps on digits, with fields replaced by their text."""
    return lambda **changes: named("digits").with_fields(TINY | changes)


@pytest.fixture(scope="session")
def tiny_options():
    """The same as words of the command line."""
    return lambda **changes: [word for item in (TINY | changes).items() for word in ("--set", "=".join(item))]
