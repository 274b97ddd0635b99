"""Certified spectral norms of neural-network layers, for PyTorch."""

from typing import TYPE_CHECKING, Any

from gramcert import nn, parametrizations, rescaling
from gramcert.auditing.entry import audit
from gramcert.auditing.result import Audit
from gramcert.auditing.verifying import verify
from gramcert.bounds.circular import norm2_circ
from gramcert.bounds.gram import gram_norm
from gramcert.bounds.layer import norm2
from gramcert.bounds.toeplitz import norm2_toep
from gramcert.bounds.transfer import norm2_sampled, sampling_factor
from gramcert.certification.accuracy import CertifiedAccuracy, certify
from gramcert.certification.bound import lipschitz_bound
from gramcert.certification.inverse import Inverse, inverse_bound, invert
from gramcert.certified.choose import spectral_norm
from gramcert.certified.smallest import condition_number, smallest_singular_value
from gramcert.certified.spectrum import Spectrum, singular_values
from gramcert.enclosure import Enclosure
from gramcert.geometry.convolution import Convolution
from gramcert.projecting.hook import projection
from gramcert.projecting.polar import polar_step
from gramcert.projecting.project import project

if TYPE_CHECKING:  # loaded when it is asked for
    from gramcert.training.loop import train

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "CertifiedAccuracy",
    "Convolution",
    "Enclosure",
    "Inverse",
    "Spectrum",
    "audit",
    "certify",
    "condition_number",
    "gram_norm",
    "inverse_bound",
    "invert",
    "lipschitz_bound",
    "nn",
    "norm2",
    "norm2_circ",
    "norm2_sampled",
    "norm2_toep",
    "parametrizations",
    "polar_step",
    "project",
    "projection",
    "rescaling",
    "sampling_factor",
    "singular_values",
    "smallest_singular_value",
    "spectral_norm",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Training, which most programs do not need, is loaded with its first use."""
    if name == "train":
        from gramcert.training.loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
