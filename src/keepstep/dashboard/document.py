"""Values as JSON: what `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


def as_json(value: Any) -> Any:
    """A value of what JSON has: dataclasses and named tuples become objects, enums their names in
    small letters, paths text, and NaN and infinity null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return finite(value) if isinstance(value, float) else value


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinity."""
    return value if math.isfinite(value) else None
