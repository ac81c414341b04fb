"""What the logs of a failed run say: one cause, one culprit, or that they do not tell."""
