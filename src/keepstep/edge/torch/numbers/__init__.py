"""Numbers: what is finite in a step, what is not, and where that began."""
