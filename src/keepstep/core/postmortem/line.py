"""A line of a log: what stands at its head, and who said the rest.

Comes in: one line as text, cut to a bound by who read it. Goes out: a `LogLine`.

Launchers, loggers, kernels and libraries each put something before the words: `[rank3]:`, `3: `,
`[1,3]<stderr>:`, a time, a level, a host. The head is taken off piece by piece, each by an
expression that is anchored, without nested repetition and of bounded length: no line takes longer
than its length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Speaker = Literal["program", "kernel", "nccl", "slurm", "torch"]

MAX_PIECES = 16
LEVELS = ("DEBUG", "INFO", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL")
MILD = ("DEBUG", "INFO", "WARNING", "WARN", "D", "I", "W")
SLURM = ("slurmstepd", "srun: ", "slurmctld", "slurmd")
MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"

COLOURS = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
GARBAGE = re.compile("[\x00-\x06\x0e-\x1a\x1c-\x1f\ufeff]")  # no text has it
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d{1,9})?)"
_DATE = r"(?P<month>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2})"
PIECES = [
    re.compile(pattern)
    for pattern in (
        r"\[[Rr]ank ?(?P<rank>\d{1,6})\]:? ?",
        r"\[\d{1,6},(?P<rank>\d{1,6})\]<std(?:err|out)>: ?",
        r"\[[a-z_]{1,40}(?P<local>\d{1,6})\]: ?",
        r"std(?:out|err) [FP] (?P<stream>)",  # Kubernetes' runtimes
        r"(?=\S{0,80}\d)(?:(?:[\w./-]{1,80}|\[std(?:out|err)\]) ){1,3}(?=\[[Rr]ank ?\d{1,6}\])",
        r"(?:[\w./-]{1,120} ){1,2}(?=\d{4}-\d\d-\d\dT)",  # stern: pod and container
        r"(?P<margin> {2,80})\| ",
        r"(?:ts|time|timestamp|t|msg|message|error|err)=\"?(?=[\w\[(<])",  # of logfmt
        r"\" (?=[a-z_]{1,20}=)",
        r"(?:level|lvl|severity)=\"?(?P<level>[A-Za-z]{1,8})\"? ",
        r"(?:global_)?[Rr]ank=(?P<rank>\d{1,6})[ ,|]{1,3}",
        rf"\[?{_DATE} {_CLOCK} (?P<host>[\w.-]{{1,80}}) (?P<kernel>kernel): ?",
        rf"\[[A-Z][a-z]{{2}} {_DATE} {_CLOCK} \d{{4}}\](?P<kernel>) ?",
        r"\[ {0,8}\d{1,10}\.\d{3,9}\](?P<kernel>) ?",
        rf"[\[(]?\d{{4}}[-/](?P<mm>\d\d)[-/](?P<dd>\d\d)[T_ ]{_CLOCK}"
        r"(?:Z|[+-]\d\d:?\d\d)?[\])]?[ :,-]{0,4}",
        r"(?:(?P<host>[\w.-]{1,80}) )?(?P<kernel>kernel): ?",
        r"(?P<kernel>kern) {1,4}:[a-z]{3,6} {1,4}: ?",  # dmesg -x
        rf"\[?(?P<level>[IWEF])(?P<mmdd>\d{{3,4}}) {_CLOCK}[^\]\n]{{0,160}}\] ?(?P<torch>)",
        r"\[(?P<level>[IWEF])\d{0,4} [^\]\n]{1,160}\] ?(?P<torch>)",
        r"(?P<host>[\w.-]{1,80}):(?P<pid>\d{1,9}):\d{1,9} \[(?P<device>\d{1,4})\] (?P<nccl>)",
        r"\((?:[^)\n]{0,80} )?pid=(?P<pid>\d{1,9})[^)\n]{0,80}\) ?",
        r"\[(?P<group>PG [^\]\n]{0,80}) Rank (?P<rank>\d{1,6})\]:? ?(?P<torch>)",
        r"\[?(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b\]?[ :|-]{0,4}",
        r"\[[^\]\n]{0,60}?\b[Rr]ank[ :=]{0,2}(?P<rank>\d{1,6})\]:? ?",
        r"\[[^\]\n]{0,120}\][ :-]{1,3}",
    )
]
LABEL = re.compile(
    r" {0,6}(?:(?P<rank>\d{1,6}): ?|\[(?P<number>\d{1,4})\] (?=\S))|(?P<column>\d{1,6}) \| "
)
EACH_HOST = re.compile(  # of pdsh, clush
    r"(?=[\w.-]{0,80}\d)(?P<host>[a-z][\w.-]{0,80}|\d{1,3}(?:\.\d{1,3}){3})(?<!\.py)(?<!\.sh): "
    r"(?=\[|Traceback \(| {2}File |\d{4}-|[IWEF]\d{4} |[A-Z]\w{0,80}(?:Error|Exception)\b"
    r"|[a-z_]\w{0,40}\.[\w.]{0,80}(?:Error|Exception)\b|Fatal |Segmentation |DEBUG|INFO|WARN|ERROR)"
)
POD = re.compile(r"[A-Za-z][\w./-]{0,80} {1,30}\| (?=\S)")  # of docker compose, kubetail
LOGGER = re.compile(r"(?P<name>[A-Za-z_][\w.-]{0,80})(?::\d{1,6})?(?:: | - )")
EXCEPTION_NAME = re.compile(
    r"(?:what\(\)|(?:Base)?Exception(?:Group)?\b"
    r"|(?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80}(?:Error|Exception|Exit|Interrupt)\b)"
)
EXCEPTION = re.compile(rf"{EXCEPTION_NAME.pattern}(?:: |:?$)|(?:CUDA|HIP) error: ")
DOTTED = re.compile(r"(?:[a-z_]\w{0,80}\.){1,12}[A-Za-z_]\w{0,80}(?:: |:?$)")  # `zlib.error: `


@dataclass(slots=True)
class LogLine:
    """`text`: all of it, without colours; `body`: without its head. `label`: what a launcher put
    before it, for telling ranks in one file apart. `seconds`: its time in the year, None: it says
    none; `clock`: as it was written. `group`: the process group that torch names. `is_traced`: a
    traceback stands above it, which only who has the file knows. `is_nested`: it stands in the
    margin of an exception group."""

    text: str
    body: str
    by: Speaker = "program"
    rank: int | None = None
    local: int | None = None
    host: str | None = None
    pid: int | None = None
    device: int | None = None
    group: str = ""
    level: str = ""
    seconds: float | None = None
    clock: str = ""
    label: str = ""
    is_traced: bool = False
    is_nested: bool = False

    @property
    def is_mild(self) -> bool:
        """Its logger does not call it an error."""
        return self.level in MILD

    @property
    def is_exception(self) -> bool:
        """Of a name that ends otherwise than theirs, only the traceback above it tells."""
        if self.is_mild:
            return False
        if EXCEPTION.match(self.body):
            return True
        return self.is_traced and DOTTED.match(self.body) is not None

    @property
    def may_be_exception(self) -> bool:
        return not self.is_mild and bool(EXCEPTION.match(self.body) or DOTTED.match(self.body))


def parse_line(text: str) -> LogLine:
    """What stands at the head of this line, and the rest."""
    text = text_in(COLOURS.sub("", text).strip("\r\n"))
    line = LogLine(text, text)
    at = 0
    if found := LABEL.match(text):
        line.rank = int(found["rank"] or found["number"] or found["column"])
        line.label, at = found[0], found.end()
    elif found := EACH_HOST.match(text):
        line.label, line.host, at = found[0], found["host"], found.end()
    elif (found := POD.match(text)) and found[0].rstrip(" |") not in LEVELS:
        line.label, at = found[0], found.end()
    for _ in range(MAX_PIECES):
        found = next((f for piece in PIECES if (f := piece.match(text, at))), None)
        if found is None or found.end() == at:
            break
        _take(line, found, at)
        at = found.end()
    if line.level and (named := LOGGER.match(text, at)):  # `trainer: `, but not `KeyError: `
        at = at if EXCEPTION_NAME.fullmatch(named["name"]) else named.end()
    line.body = text[at:].lstrip()
    if line.by == "program" and line.body.startswith(SLURM):
        line.by = "slurm"
    return line


def text_in(text: str) -> str:
    """Without the bytes that a log that was cut off, or a disk that lost a page, has in it: the
    longest stretch of text between them."""
    if text.isprintable() or not GARBAGE.search(text):
        return text
    return max(GARBAGE.split(text), key=len)


def _take(line: LogLine, found: re.Match[str], at: int) -> None:
    parts = {name: value for name, value in found.groupdict().items() if value is not None}
    if at == 0 and ("rank" in parts or "local" in parts):
        line.label = found[0]
    elif at == len(line.label) and line.host and "rank" in parts:
        line.label += found[0]  # of one host's ranks
    for name in ("rank", "local", "pid", "device"):
        if name in parts and (name != "rank" or line.rank is None):
            setattr(line, name, int(parts[name]))
    for name in ("host", "level", "group"):
        if name in parts:
            setattr(line, name, parts[name].upper() if name == "level" else parts[name])
    line.is_nested = line.is_nested or "margin" in parts
    for speaker in ("kernel", "nccl", "torch"):
        if speaker in parts:
            line.by = speaker
    if "h" in parts and line.seconds is None:
        line.seconds, line.clock = _seconds(parts), found[0].strip(" []:,-")


def _seconds(parts: dict[str, str]) -> float:
    """Since the year began; months have 31 days, since only the order counts."""
    if "mmdd" in parts:
        month, day = int(parts["mmdd"][:-2]), int(parts["mmdd"][-2:])
    elif "month" in parts:
        month, day = MONTHS.find(parts["month"]) // 3 + 1, int(parts["day"])
    else:
        month, day = int(parts["mm"]), int(parts["dd"])
    clock = int(parts["h"]) * 3600 + int(parts["m"]) * 60 + float(parts["s"].replace(",", "."))
    return (month * 31 + day) * 86400 + clock
