"""First line: what one of torch's errors says, without the pages about its insides behind it."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Empty for an error without words."""
    return str(error).partition("\n")[0]
