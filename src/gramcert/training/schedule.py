"""The learning rate: piecewise linear in the step, 0 → lr → final_lr → 0."""

import numpy as np

from gramcert.training.configuration import Configuration


def learning_rate(configuration: Configuration, step: int, steps: int) -> float:
    """At a step counted from 0 of that many; at the middle of the step, so that neither end is lost to a rate of 0."""
    rates = (0.0, configuration.lr, configuration.final_lr, 0.0)
    return float(np.interp((step + 0.5) / steps, (0.0, *configuration.knots, 1.0), rates))
