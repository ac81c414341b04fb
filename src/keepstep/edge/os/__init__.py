"""The operating system: processes, clocks, locks, threads, files that tell of errors."""
