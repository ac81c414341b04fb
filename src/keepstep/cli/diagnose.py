"""`keepstep diagnose`: why a run failed, read from the logs that it left.

Starts nothing and asks nobody. What is decided is in `core/postmortem`; here the files are read
and the answer is shown. As JSON: {"class", "means", "rank", "host", "ranks", "attempt", "why",
"action", "advice", "first": line, "collective": {"group", "seq", "op", "waiting", "missing",
"how"}, "evidence": [line, ...], "put_aside": {"cascades", "teardowns", "survived"}, "files",
"unread": {file: why}, "left_out": {"read_bytes", "total_bytes", "parts", "files", "is_late",
"is_cut"}}, a line being {"file", "line", "rank", "host", "time", "class", "role", "text",
"origin"}; what nothing tells is null, and so is a line's number where too much stands before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.cli.log_reading import WITHIN_S, LeftOut, ReadLogs, read_verdict
from keepstep.core.postmortem.sightings import Sighting
from keepstep.core.postmortem.verdict import LogVerdict
from keepstep.dashboard.screen import Screen
from keepstep.edge.os.log_files import line_number
from keepstep.errors import ConfigError
from keepstep.model.units import counted, first_names, human_bytes

SHOWN_CHARACTERS = 300
SHORTEST_S, LONGEST_S = 1.0, 86_400.0
NARROWER = "name the directory of one attempt or host, or one file, or give more --within-s"
IS_UNKNOWN = 1
IS_UNREADABLE = 2


def diagnose(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory with the logs of all ranks, or a file.")
    ],
    json: JsonOption = False,
    within_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=SHORTEST_S,
            max=LONGEST_S,
            help="How long reading may take. What was not read then is told.",
        ),
    ] = WITHIN_S,
) -> None:
    """Read a failed run's logs and name the cause, the culprit rank and the cheapest action.

    Exit code 0: a cause was named; 1: it is unknown; 2: nothing could be read.
    """
    if not _exists(path):
        raise ConfigError(
            f"diagnose: expected a directory with the logs of all ranks, or a file, found nothing "
            f"at {path}"
        )
    read = read_verdict(path, within_s)
    console = Screen(highlight=False, soft_wrap=True)
    if read.verdict is None:
        for line in [*_unread_lines(read.unread), f"nothing could be read in {path}"]:
            Screen(stderr=True).print(Text(line), soft_wrap=True)
        raise typer.Exit(IS_UNREADABLE)
    if json:
        print_json(_document(read.verdict, read))
    else:
        for text in _lines(read.verdict, read):
            console.print(text)
    if not read.verdict.is_known:
        raise typer.Exit(IS_UNKNOWN)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # in a directory that may not be looked into


def _lines(verdict: LogVerdict, read: ReadLogs) -> list[Text]:
    cause, names = verdict.cause, read.names
    found = [Text(f"{cause.name}: {cause.means}", style="bold")]
    if verdict.rank is not None:
        on = f" on {verdict.host}" if verdict.host else ""
        found.append(Text(f"culprit  rank {verdict.rank}{on}"))
    else:
        where = f"host {verdict.host}" if verdict.host else "no rank in particular"
        found.append(Text(f"culprit  {where}"))
    if verdict.first is not None:
        found.append(Text(f"first    {_line(verdict.first, names)}"))
    found.append(Text(f"why      {verdict.why}"))
    if verdict.missed is not None:
        missed = verdict.missed
        op = " ".join(
            [missed.op or "the collective", "" if missed.seq is None else str(missed.seq)]
        )
        found.append(
            Text(
                f"missed   {_ranks(missed.missing)} did not enter "
                f"{op.strip()}; {counted(len(missed.waiting), 'rank')} waited: {missed.how}"
            )
        )
    found.append(Text(f"action   {cause.action}: {cause.advice}"))
    for sighting in verdict.evidence:
        kind = "also" if verdict.is_known else "seen"
        found.append(Text(f"{kind}     {_line(sighting, names)}", style="dim"))
    aside = (
        f"{counted(verdict.cascades, 'cascade')}, "
        f"{counted(verdict.teardowns, 'line')} of the teardown, "
        f"{counted(verdict.survived, 'error')} survived"
    )
    found.append(Text(f"aside    {aside}", style="dim"))
    found += [Text(f"unread   {line}", style="dim") for line in _unread_lines(read.unread)]
    if read.left:
        found.append(Text(f"not read {_left_line(read.left)}"))
    return found


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks[:8]))}"


def _unread_lines(unread: dict[str, str]) -> list[str]:
    """One for each reason: of a directory of sockets that is enough."""
    by_reason: dict[str, list[str]] = {}
    for name, why in unread.items():
        by_reason.setdefault(why, []).append(_shown(name))
    return [f"{first_names(names)}: {why}" for why, names in by_reason.items()]


def _left_line(left: LeftOut) -> str:
    left_bytes = left.total_bytes - left.read_bytes
    if left_bytes <= 0 and left.parts:  # how much more a packed file holds nobody knows
        said = [f"what comes behind the first {human_bytes(left.read_bytes)} of packed files"]
    else:
        said = [f"{human_bytes(left_bytes)} of {human_bytes(left.total_bytes)}"]
    if left.parts:
        said.append(f"of {counted(left.parts, 'file')} only parts, the ends first")
    if left.files:
        said.append(f"of {counted(left.files, 'file')} nothing")
    if left.is_cut:
        said.append("there are more files than are looked through")
    if left.is_late:
        said.append("the time was over")
    return f"{'; '.join(said)}. To narrow it, {NARROWER}"


def _line(sighting: Sighting, names: dict[str, Path]) -> str:
    number = line_number(names[sighting.place.path], sighting.offset)
    where = f"byte {sighting.offset}" if number is None else number
    is_shown = not sighting.clock or sighting.clock in sighting.text
    at = "" if is_shown else f" {sighting.clock}"
    return f"{_shown(sighting.place.path)}:{where}{at} {_shown(sighting.text)}"


def _shown(text: str) -> str:
    """What of a line is fit for a screen: a log may hold anything."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain.strip()[:SHOWN_CHARACTERS]


def _document(verdict: LogVerdict, read: ReadLogs) -> dict[str, Any]:
    names = read.names
    return {
        "class": verdict.cause.name,
        "means": verdict.cause.means,
        "rank": verdict.rank,
        "host": verdict.host,
        "ranks": list(verdict.ranks),
        "attempt": verdict.attempt,
        "why": verdict.why,
        "action": verdict.cause.action,
        "advice": verdict.cause.advice,
        "first": _as_line(verdict.first, names) if verdict.first else None,
        "collective": verdict.missed,
        "evidence": [_as_line(sighting, names) for sighting in verdict.evidence],
        "put_aside": {
            "cascades": verdict.cascades,
            "teardowns": verdict.teardowns,
            "survived": verdict.survived,
        },
        "files": len(names),
        "unread": read.unread,
        "left_out": read.left if read.left else None,
    }


def _as_line(sighting: Sighting, names: dict[str, Path]) -> dict[str, Any]:
    return {
        "file": sighting.place.path,
        "line": line_number(names[sighting.place.path], sighting.offset),
        "rank": sighting.rank,
        "host": sighting.host,
        "time": sighting.clock or None,
        "class": sighting.pattern.failure,
        "role": sighting.pattern.role,
        "text": _shown(sighting.text),
        "origin": sighting.pattern.origin,
    }
