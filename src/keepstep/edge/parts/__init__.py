"""Parts: probes of a machine's parts, each run in a process of its own (`prober.py`)."""
