"""Parts: which part of a machine is sick, and how that is known."""
