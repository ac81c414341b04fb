"""Redactor: a recorded look without what is nobody's business: names, addresses, places.

Comes in: readings as they were taken. Goes out: the same readings, in which interfaces that do not
have one of the kernel's usual names are numbered, directories are called what they are for, and
texts have no addresses of networks, no identifiers, no paths and no name of the machine. PCI
addresses, the names of devices, and every number stay: they are what a judge goes by.

Invariant: what a judge says of the scrubbed readings it says of the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from keepstep.model.parts import KernelLine, NicReading, PartReading, PlaceReading, PortReading

_USUAL = re.compile(
    r"(?:eth|en|ib|bond|veth|wlan|wl|br|docker|mlx[45]_|irdma|bnxt_re|efa_|roce|rdmap)[0-9a-fps]*"
)
_IN_TEXT = (
    (re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5,19}\b"), "<mac>"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "<ip>"),
    (re.compile(r"\b[0-9a-fA-F]{1,4}(?:::?[0-9a-fA-F]{1,4}){3,7}\b"), "<ip>"),
    (re.compile(r"(?<![\w.])(?:/[\w.@+-]+)+/?"), "<path>"),
    (
        re.compile(r"(?i)\b(name|comm|process|task|user)([=: ]+)[\w./@:-]*[\w/@-]"),
        r"\1\2<name>",
    ),
    (re.compile(r"(?i)\b(serial|uuid|guid|sn)([=: #]+)\w[\w.-]*"), r"\1\2<id>"),
)


class Redactor:
    """Of one recording: what is one thing stays one thing. names: what must not be in any text,
    such as the machine's own."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        longest_first = sorted({name for name in names if len(name) > 1}, key=len, reverse=True)
        self._names = [
            re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in longest_first
        ]
        self._numbered: dict[str, str] = {}

    def reading(self, probe: str, reading: PartReading) -> PartReading:
        """Of that probe."""
        match reading:
            case NicReading():
                return replace(reading, name=self._device(reading.name))
            case PortReading():
                return replace(reading, device=self._device(reading.device))
            case PlaceReading():
                return replace(reading, path=probe, refusal=self.text(reading.refusal))
            case KernelLine():
                return replace(reading, text=self.text(reading.text))
        return reading

    def text(self, text: str) -> str:
        """A sentence, or a line of a log."""
        for pattern, instead in _IN_TEXT:
            text = pattern.sub(instead, text)
        for name in self._names:
            text = name.sub("<host>", text)
        return text

    def _device(self, name: str) -> str:
        if _USUAL.fullmatch(name):
            return name
        return self._numbered.setdefault(name, f"nic{len(self._numbered)}")
