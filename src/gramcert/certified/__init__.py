"""Enclosures of spectral norms: floats out, all rounding included."""
