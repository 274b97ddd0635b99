"""Quadratic functions below the margins of a classifier, and the radii that follow."""
