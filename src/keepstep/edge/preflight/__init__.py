"""Preflight: measured checks of one machine and of the links between two."""
