"""`keepstep diagnose`: why a run failed, read from the logs that it left.

Starts nothing and asks nobody. What is decided is in `core/postmortem`; here the files are read
and the answer is shown. As JSON: {"class", "means", "rank", "host", "ranks", "attempt", "why",
"action", "advice", "first": line, "collective": {"group", "seq", "op", "waiting", "missing",
"how"}, "evidence": [line, ...], "put_aside": {"cascades", "teardowns", "survived"}, "files",
"unread"}, a line being {"file", "line", "rank", "host", "time", "class", "role", "text",
"origin"}; what nothing tells is null.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from keepstep.cli.job_choice import JsonOption, print_json
from keepstep.cli.progress_bar import bytes_bar
from keepstep.core.postmortem import collectives, exits
from keepstep.core.postmortem.places import places_of
from keepstep.core.postmortem.recorder import parse_dump, rank_in
from keepstep.core.postmortem.sightings import INTRODUCED, Sighting, Sightings
from keepstep.core.postmortem.table import parse_table
from keepstep.core.postmortem.verdict import LogVerdict, judge
from keepstep.edge.os.log_files import find_logs, line_number, search
from keepstep.edge.os.own_tables import pattern_text
from keepstep.edge.os.recorder_dumps import read_dump
from keepstep.errors import ConfigError
from keepstep.model.units import counted

SHOWN_CHARACTERS = 300
IS_UNKNOWN = 1
IS_UNREADABLE = 2


def diagnose(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory with the logs of all ranks, or a file.")
    ],
    json: JsonOption = False,
) -> None:
    """Read a failed run's logs and name the cause, the culprit rank and the cheapest action.

    Exit code 0: a cause was named; 1: it is unknown; 2: nothing could be read.
    """
    if not path.exists():
        raise ConfigError(
            f"diagnose: expected a directory with the logs of all ranks, or a file, found nothing "
            f"at {path}"
        )
    verdict, names, unread = read_verdict(path)
    console = Console(highlight=False, soft_wrap=True)
    if verdict is None:
        for name, why in unread.items():
            Console(stderr=True).print(Text(f"{_shown(name)}: {why}"), soft_wrap=True)
        Console(stderr=True).print(Text(f"nothing could be read in {path}"), soft_wrap=True)
        raise typer.Exit(IS_UNREADABLE)
    if json:
        print_json(_document(verdict, names, unread))
    else:
        for line in _lines(verdict, names, unread):
            console.print(line)
    if not verdict.is_known:
        raise typer.Exit(IS_UNKNOWN)


def read_verdict(path: Path) -> tuple[LogVerdict | None, dict[str, Path], dict[str, str]]:
    """What the logs there say, None: nothing could be read; the files by name; those that could not
    be read, and why."""
    names = {
        file.relative_to(path).as_posix() if path.is_dir() else file.name: file
        for file in find_logs(path)
    }
    seen = Sightings(parse_table(pattern_text()), places_of(list(names)))
    words = [*seen.table.needles(), *exits.NEEDLES, *collectives.NEEDLES, INTRODUCED]
    unread: dict[str, str] = {}
    sizes = {name: _size(file) for name, file in names.items()}
    with bytes_bar() as bar:
        task = bar.add_task("reading", total=sum(sizes.values()))
        for name, file in names.items():
            try:
                if not _take_dump(seen, file, name):
                    for excerpt in search(file, name, words):
                        seen.see(excerpt)
            except OSError as error:
                unread[name] = error.strerror or str(error)
            except ValueError as error:
                unread[name] = str(error)
            bar.advance(task, sizes[name])
    if len(unread) == len(names):
        return None, names, unread
    return judge(seen), names, unread


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # it is told when it is read


def _unpickle(raw: bytes) -> object:
    """Raises UntrustedError, ValueError where there is no torch."""
    try:
        from keepstep.edge.torch.pickles.plain import load_plain
    except ImportError as error:
        raise ValueError(
            "a flight recorder's dump is read with torch, which is not here"
        ) from error
    return load_plain(raw)


def _take_dump(seen: Sightings, file: Path, name: str) -> bool:
    """Whether the file is a dump of torch's flight recorder; then what it tells is kept. Raises
    OSError, ValueError."""
    document = read_dump(file, _unpickle)
    if document is None:
        return False
    rank = rank_in(name)
    if rank is None:
        raise ValueError("a flight recorder's dump: expected its rank at the end of its name")
    seen.recorder.take(parse_dump(rank, document))
    seen.who.is_here(rank, seen.places[name].host)
    return True


def _lines(verdict: LogVerdict, names: dict[str, Path], unread: dict[str, str]) -> list[Text]:
    cause = verdict.cause
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
        op = " ".join([missed.op or "collective", "" if missed.seq is None else str(missed.seq)])
        found.append(
            Text(
                f"missed   rank {', '.join(map(str, missed.missing[:8]))} did not enter "
                f"{op.strip()}; {counted(len(missed.waiting), 'rank')} waited: {missed.how}"
            )
        )
    found.append(Text(f"action   {cause.action}: {cause.advice}"))
    for sighting in verdict.evidence:
        kind = "also" if verdict.is_known else "seen"
        found.append(Text(f"{kind}     {_line(sighting, names)}", style="dim"))
    aside = (
        f"{verdict.cascades} cascades, {verdict.teardowns} of the teardown, "
        f"{counted(verdict.survived, 'error')} survived"
    )
    found.append(Text(f"aside    {aside}", style="dim"))
    found += [Text(f"unread   {_shown(name)}: {why}", style="dim") for name, why in unread.items()]
    return found


def _line(sighting: Sighting, names: dict[str, Path]) -> str:
    number = line_number(names[sighting.place.path], sighting.offset)
    at = f" {sighting.clock}" if sighting.clock else ""
    return f"{_shown(sighting.place.path)}:{number}{at} {_shown(sighting.text)}"


def _shown(text: str) -> str:
    """What of a line is fit for a screen: a log may hold anything."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain.strip()[:SHOWN_CHARACTERS]


def _document(
    verdict: LogVerdict, names: dict[str, Path], unread: dict[str, str]
) -> dict[str, Any]:
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
        "unread": unread,
    }


def _as_line(sighting: Sighting, names: dict[str, Path]) -> dict[str, Any]:
    return {
        "file": sighting.place.path,
        "line": line_number(names[sighting.place.path], sighting.offset),
        "rank": sighting.rank,
        "host": sighting.host,
        "time": sighting.clock or None,
        "class": sighting.pattern.kind,
        "role": sighting.pattern.role,
        "text": _shown(sighting.text),
        "origin": sighting.pattern.origin,
    }
