"""Said: the last line of what a child wrote, for the sentence about its end."""

from __future__ import annotations

LAST_BYTES = 500


def last_line(said: bytes) -> str:
    """Of what a child wrote; it may be long, and of any encoding."""
    lines = said[-LAST_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "(no word)"
