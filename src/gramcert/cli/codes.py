"""Exit codes, without anything that takes time to load."""

NEGATIVE_ANSWER, BAD_INPUT, ABOVE_LIMIT = 1, 2, 3
