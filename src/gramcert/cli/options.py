"""Options that several commands share, and how sizes, paddings and radii are written."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from gramcert.cli.errors import BadInput
from gramcert.exact import float_up
from gramcert.geometry.convolution import Padding

# Larger sizes are mistakes: no layer has them, and torch counts in 64 bits.
LARGEST = 2**31 - 1

DATA_VARIABLE = "GRAMCERT_DATA"
DATA = Annotated[
    Path | None,
    typer.Option(
        envvar=DATA_VARIABLE,
        help="Archive or folder of the images; not needed for digits. For other models a .npz file: images, labels.",
    ),
]
STEPS = Annotated[int, typer.Option(help="Of the search around each input; 0 leaves it out.")]
JOBS = Annotated[int, typer.Option(help="Searches at once, each with its share of the cores.")]
RESUME = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Keep finished searches here; the same command, interrupted, goes on from them."),
]
RADII = Annotated[str, typer.Option(help="l2 radii, such as 36/255,0.5.")]

# Of moderate length: a fraction of 1e999999999 would take all memory.
_NUMBER = re.compile(r"\d{1,20}/0*[1-9]\d{0,19}|-?\d{0,20}\.?\d{1,40}(e-?\d{1,2})?")


def parse_sizes(option: str, text: str) -> int | tuple[int, ...]:
    """``32`` for every axis, or ``32,16`` for each axis."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"{option} {text!r}: expected an integer or integers like 32,16") from None
    if max(values) > LARGEST:
        raise BadInput(f"{option} {text!r}: expected integers up to {LARGEST}")
    return values if len(values) > 1 else values[0]


def parse_padding(text: str) -> Padding:
    """``1``, ``1,2`` per axis, ``1:2,0:1`` with before and after per axis, ``same`` or ``valid``."""
    if text in ("same", "valid"):
        return text
    if ":" not in text:
        return parse_sizes("--padding", text)
    try:
        sides = [[int(side) for side in axis.split(":")] for axis in text.split(",")]
    except ValueError:
        sides = [[]]
    if any(len(pair) not in (1, 2) for pair in sides):
        raise BadInput(f"--padding {text!r}: expected 1, or 1,2 per axis, or before:after per axis, or same, or valid")
    return [(pair[0], pair[-1]) for pair in sides]


def parse_radii(text: str) -> dict[str, float]:
    """``36/255,0.5``: each radius as it is written, and as the smallest float that is not below it."""
    result = {}
    for part in text.split(","):
        if not _NUMBER.fullmatch(part.strip()):
            raise BadInput(f"--radii {text!r}: expected numbers or fractions like 36/255,0.5")
        exact = Fraction(part.strip())
        if not 0 <= exact <= LARGEST:
            raise BadInput(f"--radii {text!r}: expected radii from 0 to {LARGEST}")
        result[part.strip()] = float_up(exact)
    return result


def parse_changes(option: str, texts: list[str]) -> dict[str, str]:
    """``field=value``, once or more; of the same field the last."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadInput(f"{option} {text!r}: expected FIELD=VALUE")
        changes[name.strip()] = value.strip()
    return changes
