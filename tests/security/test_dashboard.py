"""A neighbour on the same machine and the dashboard at its loopback address: another user's process
reads nothing. Needs root, to be two users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keepstep.config import Settings, resolve
from keepstep.dashboard.serving import serve_for_agent
from keepstep.dashboard.web import Served
from keepstep.edge.os.journal import FileJournal

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users are played")

EVE = 65534
OURS = "a sentence of the job's"
READER = """
import os, sys, urllib.error, urllib.request
user, url, bearer = int(sys.argv[1]), sys.argv[2], sys.argv[3]
"a name".encode("idna")  # as root: the user need not be able to read Python's own modules
os.setgid(user); os.setuid(user)
headers = {"Authorization": "Bearer " + bearer} if bearer else {}
try:
    answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, answer.read().decode())
"""


@pytest.fixture
def settings(tmp_path: object) -> Settings:
    places = {"arena_dir": f"{tmp_path}/arena", "state_dir": f"{tmp_path}/state"}
    return resolve({"job": "victim", "dashboard_address": "0", **places}, {}, "victim")


@pytest.fixture
def served(settings: Settings, request: pytest.FixtureRequest) -> Iterator[Served]:
    token = getattr(request, "param", None)
    journal = FileJournal(settings.journal_path, "agent")
    journal.record("job-started", OURS)
    made = serve_for_agent(
        resolve(
            {
                "job": "victim",
                "dashboard_address": "0",
                "dashboard_token": token,
                "arena_dir": settings.arena_dir,
                "state_dir": settings.state_dir,
            },
            {},
            "victim",
        ),
        journal,
    )
    assert made is not None
    yield made
    made.close()
    journal.close()


def read_as(user: int, url: str, token: str = "") -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "-c", READER, str(user), url, token],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    status, _, body = ran.stdout.partition(" ")
    return int(status), body


@pytest.mark.parametrize("path", ["", "live", "run?number=1", "log?number=1&before=5"])
def test_another_user_reads_nothing(served: Served, path: str) -> None:
    status, body = read_as(EVE, served.url + path)
    assert status == 403 and f"found user {EVE}" in body
    assert OURS not in body and "victim" not in body


def test_the_user_reads_it(served: Served) -> None:
    status, body = read_as(os.getuid(), served.url + "run?number=1")
    assert status == 200 and OURS in body


@pytest.mark.parametrize("served", ["a-token-that-nobody-guesses"], indirect=True)
def test_with_a_token_it_is_the_token_that_counts(served: Served) -> None:
    url = served.url + "run?number=1"
    status, body = read_as(os.getuid(), url)
    assert status == 401 and OURS not in body
    assert read_as(EVE, url, "a-token-that-nobody-guesser")[0] == 401
    assert read_as(EVE, url, "a-token-that-nobody-guesses")[0] == 200
