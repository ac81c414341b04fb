"""Comparison: what two states have in common, and what their difference means."""
