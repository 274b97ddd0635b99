"""Spectral rescaling: factors per channel that make a layer 1-Lipschitz."""

from gramcert.rescaling.vector import rescaling_vector

__all__ = ["rescaling_vector"]
