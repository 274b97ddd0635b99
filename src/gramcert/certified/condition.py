"""The quotient of the largest and the smallest singular value."""

import math
import sys

from gramcert.enclosure import Enclosure


def condition_of(largest: Enclosure, smallest: Enclosure) -> Enclosure:
    """From enclosures of both; not bounded from above where the smallest may be 0, and beyond every float if it is."""
    if smallest.upper == 0:
        return Enclosure(sys.float_info.max, math.inf)
    least = 1.0 if math.isinf(smallest.upper) else (Enclosure(largest.lower, largest.lower) / smallest.upper).lower
    most = (largest / smallest).upper if smallest.lower > 0 else math.inf
    return Enclosure(min(max(1.0, least), sys.float_info.max), most)
