"""Plain: the vocabulary of a pickle that names nothing, as a dump of torch's flight recorder."""

from __future__ import annotations

from typing import Any, NoReturn

from keepstep.edge.torch.pickles.checked import load_pickles
from keepstep.errors import UntrustedError


class Nothing:
    """See `Vocabulary`."""

    def find(self, module: str, name: str) -> NoReturn:
        """Refuses."""
        raise UntrustedError(f"it names {module[:100]}.{name[:100]}: expected plain values alone")

    def call(self, function: Any, args: tuple[Any, ...]) -> NoReturn:
        """Refuses."""
        raise UntrustedError("it calls something: expected plain values alone")

    def make(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> NoReturn:
        """Refuses."""
        raise UntrustedError("it makes an object: expected plain values alone")

    def build(self, made: Any, state: Any) -> NoReturn:
        """Refuses."""
        raise UntrustedError("it gives something a state: expected plain values alone")

    def holds(self, made: Any) -> bool:
        """Nothing but Python's own containers."""
        return False


def load_plain(raw: bytes) -> Any:
    """What a pickle of numbers, text, lists, tuples and dicts holds. Raises UntrustedError."""
    return load_pickles(raw, (1,), Nothing())[0]
