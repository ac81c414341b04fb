"""Serving: a job's dashboard, put together: looked at, modelled, served.

Comes in: a job, its journals, where to serve. Goes out: a site. What is asked of it comes from two
threads (the feed's, and a reader's who asks for a run or a log), one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keepstep.config import Settings
from keepstep.dashboard.collective_profiles import network_view
from keepstep.dashboard.feed import Feed
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.job_look import JobLook
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.page_model import CopyTraffic, account_page, page_model
from keepstep.dashboard.run_page import run_log, run_outline, run_page
from keepstep.dashboard.timeline import JobRun
from keepstep.dashboard.web import Served, check_token
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.collective_profile_page import COUNT_FILE, read_word
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.rhythm import Interleaved
from keepstep.model.units import S_NS
from keepstep.model.web_address import WebAddress, parse_web_address

# Profiles are read whole and folded anew at each look: less often than the rest.
NETWORK_EVERY_NS = 10 * S_NS


class Board:
    """What the feed looks at: a job and its journals."""

    def __init__(self, job: FoundJob, journals: Sequence[Path] = ()) -> None:
        """`journals`: other nodes' of the same job."""
        self._lock = threading.Lock()
        self._release = version("keepstep")
        self._job = job
        self._journals = journals
        self._look: JobLook | None = None
        self._page: tuple[JobRun, dict[str, Any]] | None = None  # the last run's
        self._outlines: list[tuple[JobRun, dict[str, Any]]] = []
        self._network: tuple[int, CopyTraffic] | None = None  # when it was read

    def look(self) -> dict[str, Any]:
        """The page's document, now."""
        with self._lock:
            now = Moment.now()
            look = self._looking()
            view = look.view(now)
            runs = look.history.runs
            last = self._last_page(runs)
            network = self._network_now(now) if view.job_dir is not None else CopyTraffic()
            return page_model(view, network, self._outlined(runs), last, now, self._release)

    def has_news(self) -> bool:
        """Whether a journal has grown."""
        with self._lock:
            return self._look is not None and self._look.has_news()

    def rest(self) -> None:
        """Forget everything, so that an agent whose page nobody reads carries nothing for it."""
        with self._lock:
            if self._look is not None:
                self._look.close()
            self._look, self._page, self._outlines, self._network = None, None, [], None

    def run_of(self, number: int, before: int | None) -> dict[str, Any] | None:
        """A run by its number, from 1, and its account."""
        with self._lock:
            run = self._run(number)
            if run is None:
                return None
            assert self._look is not None
            spent = self._look.history.account(number - 1, (), None)
            return {"run": run_page(number, run), "account": account_page(spent)}

    def log_of(self, number: int, before: int | None) -> dict[str, Any] | None:
        """The lines of that run's log before the one of that number."""
        with self._lock:
            run = self._run(number)
            return None if run is None or before is None else run_log(run, before)

    def _looking(self) -> JobLook:
        if self._look is None:
            self._look = JobLook(self._job, self._journals)
        return self._look

    def _run(self, number: int) -> JobRun | None:
        look = self._looking()
        if look.has_news():
            look.read_journals()
        runs = look.history.runs
        return runs[number - 1] if 0 < number <= len(runs) else None

    def _last_page(self, runs: Sequence[JobRun]) -> dict[str, Any] | None:
        """The same object for as long as the run is the same."""
        if not runs:
            return None
        if self._page is None or self._page[0] is not runs[-1]:
            self._page = runs[-1], run_page(len(runs), runs[-1])
        return self._page[1]

    def _outlined(self, runs: Sequence[JobRun]) -> list[dict[str, Any]]:
        known = self._outlines
        self._outlines = [
            known[place]
            if place < len(known) and known[place][0] is run
            else (run, run_outline(place + 1, run))
            for place, run in enumerate(runs)
        ]
        return [outline for _, outline in self._outlines]

    def _network_now(self, now: Moment) -> CopyTraffic:
        known = self._network
        if known is None or now.mono_ns - known[0] >= NETWORK_EVERY_NS:
            view = network_view(self._job.job_dir)
            done = read_word(MEMORY, self._job.job_dir / COUNT_FILE, Interleaved)
            known = self._network = now.mono_ns, CopyTraffic(view, done)
        return known[1]


def serve_job(
    job: FoundJob,
    address: WebAddress | None,
    token: str | None,
    journals: Sequence[Path] = (),
) -> Served:
    """Serve a job's dashboard. Raises ConfigError: the address is taken, or needs a token."""
    board = Board(job, journals)
    return Served(address, token, Feed(board), board.run_of, board.log_of)


def is_wanted(settings: Settings) -> bool:
    """Whether the agent serves a dashboard."""
    return settings.dashboard or settings.dashboard_address is not None


def address_of(settings: Settings) -> WebAddress | None:
    """Where: None for a free port of loopback. Raises ConfigError when it needs a token."""
    if settings.dashboard_address is None:
        return None
    address = parse_web_address(settings.dashboard_address)
    check_token(address, settings.dashboard_token)
    return address


def serve_for_agent(settings: Settings, journal: FileJournal) -> Served | None:
    """The agent's dashboard of its own job, told in the journal; None when none is wanted. Raises
    ConfigError."""
    if not is_wanted(settings):
        return None
    job = FoundJob(settings.job, settings.job_dir, settings.journal_path, True, 0)
    served = serve_job(job, address_of(settings), settings.dashboard_token)
    who = "whoever shows the token" if settings.dashboard_token else "this user and root"
    journal.record("dashboard-served", f"the dashboard, for {who}: {served.url}")
    return served
