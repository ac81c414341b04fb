"""Faults on purpose, and the small deterministic job that proves the recovery."""
