"""Probes: what the operating system says about a process that may not answer itself."""
