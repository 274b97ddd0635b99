"""What a constant means, in words and as a tone: for the terminal and for the page."""

import math

from gramcert.auditing.readable import shown_down, shown_up
from gramcert.rounding import product_up, up

# Up to the first a network moves nothing apart, but for tolerances; beyond the second its bound says little.
NEARLY_ONE, LARGE = 1.001, 1000.0

# A change of the input that a large constant is shown for.
SMALL = 0.001


def tone(upper: float) -> str:
    """``good``, ``moderate``, ``large`` or ``unbounded``."""
    if not upper < math.inf:
        return "unbounded"
    return "good" if upper <= NEARLY_ONE else "large" if upper > LARGE else "moderate"


def meaning(upper: float) -> str:
    """Of a finite upper bound.

    Example:
        >>> meaning(2.0)
        'Two outputs are never more than 2 times as far apart as their inputs.'
        >>> meaning(1.0)
        'Two outputs are never farther apart than their inputs.'
        >>> meaning(1e6).partition("inputs. ")[2]
        'That rules out little: inputs at a distance of 0.001 may have outputs 1001 apart.'
    """
    if upper == 1:
        return "Two outputs are never farther apart than their inputs."
    text = f"Two outputs are never more than {shown_up(upper)} times as far apart as their inputs."
    if tone(upper) == "large":
        most = shown_up(product_up(SMALL, upper), 4)
        text += f" That rules out little: inputs at a distance of {SMALL} may have outputs {most} apart."
    return text


def from_below(lower: float, upper: float) -> str:
    """What two inputs prove.

    Example:
        >>> from_below(1.5, 2.0).partition(" whose outputs are so many times as far apart, ")[::2]
        ('At least 1.5: two inputs were found', 'so 2 is at most 1.34 times too large.')
    """
    found = f"At least {shown_down(lower, 4)}: two inputs were found whose outputs are so many times as far apart"
    excess = up(upper / lower) if lower > 0 else math.inf
    if not excess < math.inf:
        return f"{found}."
    return f"{found}, so {shown_up(upper)} is at most {shown_up(excess, 3)} times too large."
