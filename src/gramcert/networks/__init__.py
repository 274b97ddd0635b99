"""From operators to networks: quadratic forms with multipliers, searched in floating point and proved apart."""
