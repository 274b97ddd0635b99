"""Certified spectral norms of neural-network layers, for PyTorch.

Names are loaded, and torch with them, when they are first used: ``gramcert --version`` needs neither.
"""

import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for checkers of types; a test compares it with what is loaded
    from gramcert import nn as nn
    from gramcert import parametrizations as parametrizations
    from gramcert import rescaling as rescaling
    from gramcert.auditing.entry import audit as audit
    from gramcert.auditing.result import Audit as Audit
    from gramcert.auditing.verifying import verify as verify
    from gramcert.bounds.circular import norm2_circ as norm2_circ
    from gramcert.bounds.gram import gram_norm as gram_norm
    from gramcert.bounds.layer import norm2 as norm2
    from gramcert.bounds.toeplitz import norm2_toep as norm2_toep
    from gramcert.bounds.transfer import norm2_sampled as norm2_sampled
    from gramcert.bounds.transfer import sampling_factor as sampling_factor
    from gramcert.certification.accuracy import CertifiedAccuracy as CertifiedAccuracy
    from gramcert.certification.accuracy import certify as certify
    from gramcert.certification.attacks import AttackedAccuracy as AttackedAccuracy
    from gramcert.certification.attacks import attack as attack
    from gramcert.certification.bound import lipschitz_bound as lipschitz_bound
    from gramcert.certification.inverse import Inverse as Inverse
    from gramcert.certification.inverse import inverse_bound as inverse_bound
    from gramcert.certification.inverse import invert as invert
    from gramcert.certified.choose import spectral_norm as spectral_norm
    from gramcert.certified.smallest import condition_number as condition_number
    from gramcert.certified.smallest import smallest_singular_value as smallest_singular_value
    from gramcert.certified.spectrum import Spectrum as Spectrum
    from gramcert.certified.spectrum import singular_values as singular_values
    from gramcert.enclosure import Enclosure as Enclosure
    from gramcert.geometry.convolution import Convolution as Convolution
    from gramcert.projecting.hook import projection as projection
    from gramcert.projecting.polar import polar_step as polar_step
    from gramcert.projecting.project import project as project
    from gramcert.training.loop import train as train

__version__ = "0.1.0"

# In which module each name is; an empty text for modules themselves.
_HOMES = {
    "AttackedAccuracy": "certification.attacks",
    "Audit": "auditing.result",
    "CertifiedAccuracy": "certification.accuracy",
    "Convolution": "geometry.convolution",
    "Enclosure": "enclosure",
    "Inverse": "certification.inverse",
    "Spectrum": "certified.spectrum",
    "attack": "certification.attacks",
    "audit": "auditing.entry",
    "certify": "certification.accuracy",
    "condition_number": "certified.smallest",
    "gram_norm": "bounds.gram",
    "inverse_bound": "certification.inverse",
    "invert": "certification.inverse",
    "lipschitz_bound": "certification.bound",
    "nn": "",
    "norm2": "bounds.layer",
    "norm2_circ": "bounds.circular",
    "norm2_sampled": "bounds.transfer",
    "norm2_toep": "bounds.toeplitz",
    "parametrizations": "",
    "polar_step": "projecting.polar",
    "project": "projecting.project",
    "projection": "projecting.hook",
    "rescaling": "",
    "sampling_factor": "bounds.transfer",
    "singular_values": "certified.spectrum",
    "smallest_singular_value": "certified.smallest",
    "spectral_norm": "certified.choose",
    "train": "training.loop",
    "verify": "auditing.verifying",
}
__all__ = sorted(_HOMES)

# One thread at a time: torch does not stand two that begin at different places, and neither do circles of module locks.
# The same thread may come again, from inside of an import.
_IMPORTING = threading.RLock()


def __getattr__(name: str) -> Any:
    """A public name, with its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    with _IMPORTING:
        module = importlib.import_module(f"gramcert.{home or name}")
    found = getattr(module, name) if home else module
    globals()[name] = found  # so that it is asked for once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
