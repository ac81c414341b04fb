"""The page in a real browser: it asks nobody else, nothing becomes markup, it is legible in both
schemes and on a phone, reached by keyboard, and 1,000 ranks are usable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.serving import serve_job
from keepstep.dashboard.web import Served
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.model.units import MIB, MS_NS
from tests.dashboard.browser import Visit, chromium

pytestmark = pytest.mark.timeout(300)
EVIL = '<img src="http://evil.example/x" onerror="document.title=1"><script>window.x=2</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


class Scene:
    """A job in pages and a journal of its own."""

    def __init__(self, room: Path, ranks: int) -> None:
        self.job_dir = job_dir_of(room, "demo")
        self.journal = FileJournal(room / "state" / "demo" / "journal.jsonl", "agent")
        self.pages = [self._page(rank, ranks) for rank in range(ranks)]
        self.say("keeper-started", "a keeper has it", adopted_slots=0)
        for rank in range(min(ranks, 4)):
            self.say("rank-joined", f"rank {rank} joins", rank=rank, pid=100 + rank)
        self.say("resumed", "all start afresh", source="fresh", step=-1, lost_steps=0, epoch=1)
        job = FoundJob("demo", self.job_dir, room / "state" / "demo" / "journal.jsonl", True, 0)
        self.served: Served = serve_job(job, None, None)

    def _page(self, rank: int, ranks: int) -> StatusPage:
        page = StatusPage.own(MEMORY, self.job_dir, rank)
        assert page is not None
        page.publish(
            **{"rank": rank, "world_size": ranks, "pid": 100 + rank, "epoch": 1, "step": 8},
            **{"phase": Phase.FORWARD, "completed_step": 7, "payload_bytes": 3 * MIB},
            **{"step_ns_last": 20 * MS_NS, "loss": 0.25, "captured_steps": 7},
            slots=tuple(SlotView(SlotState.SEALED, Stamp(step, 1)) for step in (6, 7)),
        )
        return page

    def say(self, kind: str, why: str, **data: Any) -> None:
        self.journal.record(kind, why, **data)

    def fail(self, why: str, epoch: int = 2) -> None:
        self.say("rank-exited", why, rank=1, code=-9)
        self.say("ranks-restarted", "the ranks run again")
        memory = {"source": "memory", "step": 7, "lost_steps": 1, "epoch": epoch}
        self.say("resumed", "every rank has proven step 7", **memory)

    def close(self) -> None:
        self.served.close()
        for page in self.pages:
            page.close()
        self.journal.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, 3)
    yield made
    made.close()


def test_it_asks_nobody_else_and_nothing_becomes_markup(browser: Any, scene: Scene) -> None:
    scene.fail(EVIL)
    visit = Visit(browser, scene.served.url)
    visit.page.wait_for_selector("#recoveries-list details")
    assert EVIL in visit.text("#log-table") and EVIL in visit.text("#recoveries-list")
    assert visit.page.title() == "training: demo"
    assert visit.page.query_selector_all("main img, main script, main iframe") == []
    assert visit.asked and all(url.startswith(scene.served.url) for url in visit.asked)
    assert visit.complaints == [], "the policy stops nothing of the page's own"
    visit.close()


def test_what_it_shows(browser: Any, scene: Scene) -> None:
    scene.fail("rank 1 was killed by SIGKILL (9)")
    visit = Visit(browser, scene.served.url)
    assert "step" in visit.text("#figures") and "7" in visit.text("#figures")
    assert "3 ranks: 3 as they should be" in visit.text("#ranks-count")
    assert "forward of step 8" in visit.text("#rank-2")
    assert "Recovery 1: resumed with step 7 from memory" in visit.text("#recoveries-list")
    assert "productive" in visit.text("#account-table")
    label = visit.page.get_attribute("#chart svg", "aria-label")
    assert label is not None and label.startswith("Steps over time: up to step 7")
    visit.page.fill("#ranks-find", "2-")
    assert visit.page.locator("#ranks-table tbody tr").count() == 1
    visit.page.check("#log-odd")
    assert visit.page.locator("#log-table tbody tr").count() == 1
    visit.close()


def test_what_changes_is_shown_and_an_end_is_told(browser: Any, scene: Scene) -> None:
    visit = Visit(browser, scene.served.url)
    scene.pages[0].publish(step=9, completed_step=8)
    visit.until("#rank-0", "forward of step 9")
    scene.pages[2].close()
    visit.until("#findings", "Gone: rank 2.")
    assert visit.text("#state").endswith("broken")
    scene.served.close()
    visit.page.wait_for_selector("#heard:not([hidden])")
    assert "has ended" in visit.text("#heard")
    visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes(browser: Any, scene: Scene, scheme: str) -> None:
    visit = Visit(browser, scene.served.url, color_scheme=scheme)
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 20, 24)"}[scheme]
    visit.close()


def test_on_a_phone_it_does_not_scroll_sideways(browser: Any, scene: Scene) -> None:
    scene.fail("word" * 200)
    visit = Visit(browser, scene.served.url, viewport={"width": 360, "height": 740})
    visit.page.wait_for_selector("#recoveries-list details")
    width = visit.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360
    visit.close()


def test_everything_is_reached_by_keyboard(browser: Any, scene: Scene) -> None:
    scene.fail("rank 1 was killed")
    visit = Visit(browser, scene.served.url)
    visit.page.wait_for_selector("#recoveries-list details")
    reached = set()
    for _ in range(60):
        visit.page.keyboard.press("Tab")
        reached.add(
            visit.page.evaluate("document.activeElement.id || document.activeElement.tagName")
        )
    assert {"ranks-find", "ranks-which", "log-find", "log-odd", "SUMMARY", "A"} <= reached
    visit.close()


def test_a_thousand_ranks_are_usable(browser: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1000)
    visit = Visit(browser, scene.served.url)
    assert "1,000 ranks" in visit.text("#ranks-count")
    assert visit.page.locator("#ranks-table tbody tr").count() == 100
    visit.page.click("#ranks-after")
    visit.page.fill("#ranks-find", "990-")
    assert visit.page.locator("#ranks-table tbody tr").count() == 10
    scene.pages[995].close()
    visit.until("#rank-995", "gone in")
    visit.page.select_option("#ranks-which", "odd")
    others = [page for rank, page in enumerate(scene.pages) if rank >= 990 and rank != 995]
    rows = visit.page.locator("#ranks-table tbody tr")
    for _ in range(300):  # on a busy machine they count as silent, until the page has heard of them
        if rows.count() == 1:
            break
        for page in others:
            page.publish(step=9)
        visit.page.wait_for_timeout(200)
    assert rows.count() == 1 and "gone in" in visit.text("#rank-995")
    visit.close()
    scene.close()
