"""One recovery, shown: train, kill a rank in the middle of a step, and compare with a run that
nobody disturbed.

    python examples/demo.py            # what `make demo` runs, about a minute

Runs `keepstep run --nproc-per-node 2 examples/gpt.py` twice. In the first run one rank gets
SIGKILL. Both must end with the same hash over parameters, optimizer, schedule and data position, or
this program exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.model.events import Event

GPT = Path(__file__).with_name("gpt.py")
SHOWN = {
    "rank-exited",
    "lost-notice",
    "rank-respawned",
    "ranks-restarted",
    "restore-offered",
    "loaded",
    "resumed",
    "regrouped",
    "next-step",
}
console = Console(highlight=False, width=110)


class Run:
    """One `keepstep run` of the example, as a person would type it."""

    def __init__(self, name: str, directory: Path, args: argparse.Namespace) -> None:
        self.job, self.out = f"demo-{name}-{os.getpid()}", directory / f"{name}.json"
        self.journal_path = directory / "state" / self.job / "journal.jsonl"
        self.job_dir = job_dir_of(Path("/dev/shm"), self.job)
        command = [
            "keepstep",
            "run",
            "--nproc-per-node",
            str(args.nproc),
            "--job",
            self.job,
            "--state-dir",
            str(directory / "state"),
        ]
        script = [str(GPT), "--steps", str(args.steps), "--out", str(self.out)]
        console.print(
            f"\n[bold]$ {' '.join([*command[:4], 'examples/gpt.py', *script[1:3]])}[/bold]   "
            f"({name})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.cli.main", *command[1:], *script]
        )

    def kill_in_step(self, rank: int, step: int) -> None:
        """SIGKILL `rank` once it is in the middle of `step`."""
        while self.process.poll() is None:
            try:
                page = StatusPage(MEMORY, status_path(self.job_dir, rank))
            except (OSError, ValueError):
                time.sleep(0.05)
                continue
            status = page.read()
            page.close()
            if status and status.step >= step:
                time.sleep(status.step_ns_last / 2e9)
                os.kill(status.pid, signal.SIGKILL)
                console.print(
                    f"[red]>>> SIGKILL to rank {rank} (process {status.pid}) in the middle "
                    f"of step {status.step}[/red]"
                )
                return
            time.sleep(0.002)

    def finish(self) -> dict[str, object]:
        """Wait for the end and read what rank 0 wrote."""
        if self.process.wait(timeout=600) != 0:
            raise SystemExit(f"the run ended with exit code {self.process.returncode}")
        result: dict[str, object] = json.loads(self.out.read_text())
        return result

    def events(self) -> list[Event]:
        return list(read_journal(self.journal_path))


def timeline(events: list[Event]) -> Table:
    """From the kill to the next finished step, in milliseconds."""
    table = Table(title="what happened, and why", title_justify="left")
    table.add_column("after", justify="right")
    table.add_column("who")
    table.add_column("what")
    start = next(e.mono_ns for e in events if e.kind == "rank-exited")
    end = next(e.mono_ns for e in reversed(events) if e.kind == "next-step")
    for event in events:
        if event.kind in SHOWN and start <= event.mono_ns <= end:
            table.add_row(f"{(event.mono_ns - start) / 1e6:.0f} ms", event.who, event.why)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--nproc", type=int, default=2)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    try:
        struck = Run("killed", directory, args)
        struck.kill_in_step(rank=args.nproc - 1, step=args.steps // 2)
        with_kill = struck.finish()
        calm = Run("undisturbed", directory, args)
        without = calm.finish()
        events = struck.events()
        console.print()
        console.print(timeline(events))
        lost = [
            e.data["lost_steps"]
            for e in events
            if e.kind == "resumed" and e.data["source"] != "fresh"
        ]
        stalls = [e.data["stall_ns_per_step"] / 1e6 for e in calm.events() if e.kind == "summary"]
        equal = with_kill["sha256"] == without["sha256"]
        console.print(f"lost steps: {lost}    stall a step: {max(stalls):.2f} ms")
        console.print(
            f"sha256 with the kill:  {with_kill['sha256']}\nsha256 undisturbed:    "
            f"{without['sha256']}"
        )
        console.print("[bold green]equal, bit for bit[/]" if equal else "[bold red]DIFFERENT[/]")
        sys.exit(0 if equal and len(lost) == 1 else 1)
    finally:
        for run in (r for r in (locals().get("struck"), locals().get("calm")) if r is not None):
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGINT)
                run.process.wait(timeout=30)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
