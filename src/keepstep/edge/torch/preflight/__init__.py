"""Preflight: measured checks that need torch: a mini-training, a ring, devices."""
