"""Audit: a program run undisturbed and restored, and all that it can reach looked at."""
