"""Other published methods, written from their formulas, for comparison only."""

from gramcert.baselines.comparison import Comparison, Row, compare_methods
from gramcert.baselines.density import sampled_density
from gramcert.baselines.per_frequency import frequency_svd
from gramcert.baselines.power import power_iteration
from gramcert.baselines.reference import reference_norm
from gramcert.baselines.reshaped_kernel import reshaped_kernel_norm
from gramcert.baselines.reshapes import four_reshapes
from gramcert.baselines.tensor import tensor_norm

__all__ = [
    "Comparison",
    "Row",
    "compare_methods",
    "four_reshapes",
    "frequency_svd",
    "power_iteration",
    "reference_norm",
    "reshaped_kernel_norm",
    "sampled_density",
    "tensor_norm",
]
