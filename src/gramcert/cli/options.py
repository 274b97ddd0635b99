"""Sizes and paddings as they are written on the command line."""

from gramcert.cli.errors import BadInput
from gramcert.geometry.convolution import Padding

# Larger sizes are mistakes: no layer has them, and torch counts in 64 bits.
LARGEST = 2**31 - 1


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
