"""The images of a command that has the option ``--data``."""

import os
from pathlib import Path

from gramcert.cli.errors import BadInput
from gramcert.cli.options import DATA_VARIABLE
from gramcert.training.images import Images, load_images


def images_of(dataset: str, data: Path | None) -> Images:
    """Of a set by its name; a path for one that needs none is an error, unless it comes from the environment."""
    if dataset == "digits" and data is not None and str(data) != os.environ.get(DATA_VARIABLE):
        raise BadInput(f"--data {data}: the digits are embedded; for other images choose another dataset")
    return load_images(dataset, data)
