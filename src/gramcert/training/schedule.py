"""The learning rate: piecewise linear in the step, 0 → lr → final_lr → 0."""

from gramcert.training.configuration import Configuration


def learning_rate(configuration: Configuration, step: int, steps: int) -> float:
    """At a step counted from 0 of that many; at the middle of the step, so that neither end is lost to a rate of 0."""
    share = (step + 0.5) / steps
    places = (0.0, *configuration.knots, 1.0)
    rates = (0.0, configuration.lr, configuration.final_lr, 0.0)
    for low, high, first, last in zip(places, places[1:], rates, rates[1:], strict=False):
        if share <= high and high > low:
            return first + (last - first) * (share - low) / (high - low)
    return 0.0
