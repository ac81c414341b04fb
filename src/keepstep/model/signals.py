"""Signals: what POSIX calls them, and which ones a program brings upon itself."""

from __future__ import annotations

SIGHUP, SIGINT, SIGQUIT, SIGBUS, SIGKILL, SIGTERM = 1, 2, 3, 7, 9, 15
OUTSIDE = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 9: "SIGKILL", 15: "SIGTERM"}
FAULTS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
NAMES = OUTSIDE | FAULTS


def signal_words(signum: int) -> str:
    return f"{NAMES[signum]} ({signum})" if signum in NAMES else f"signal {signum}"
