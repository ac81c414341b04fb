"""The page over HTTP: who gets it, what a browser may do with it, and that it cannot be used up."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from keepstep.dashboard.feed import MAX_READERS, Feed
from keepstep.dashboard.web import FIRST_PORT, PORTS, Served, page, policy
from keepstep.edge.net.bounded_http import MAX_CONNECTIONS
from keepstep.errors import ConfigError
from keepstep.model.web_address import WebAddress, parse_web_address

TOKEN = "sixteen bytes at least €"
LOCAL = WebAddress("127.0.0.1", 0)


class Subject:
    def __init__(self) -> None:
        self.document: dict[str, Any] = {"job": "demo"}

    def look(self) -> dict[str, Any]:
        return self.document

    def has_news(self) -> bool:
        return False

    def rest(self) -> None:
        pass


def run_of(number: int, before: int | None) -> dict[str, Any] | None:
    return {"run": {"number": number, "why": "</script>"}} if number == 1 else None


def log_of(number: int, before: int | None) -> dict[str, Any] | None:
    return None if before is None else {"0": {"why": f"before {before} of {number}"}}


@pytest.fixture
def subject() -> Subject:
    return Subject()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def served(
    stack: ExitStack,
    subject: Subject,
    address: WebAddress | None = LOCAL,
    token: str | None = None,
) -> Served:
    made = Served(address, token, Feed(subject, every_s=0.05), run_of, log_of)
    stack.callback(made.close)
    return made


def ask(site: Served, path: str = "/", method: str = "GET", **more: str) -> HTTPResponse:
    """The answer's head; read what follows from it."""
    connection = HTTPConnection("127.0.0.1", site.address.port, timeout=30)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in more.items()})
    return connection.getresponse()


def text(answer: HTTPResponse) -> str:
    with closing(answer):
        return answer.read().decode()


def test_the_page_and_its_policy(stack: ExitStack, subject: Subject) -> None:
    answer = ask(served(stack, subject))
    assert (answer.status, answer.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    said = dict(answer.getheaders())
    assert said["Content-Security-Policy"] == policy()
    assert (said["X-Content-Type-Options"], said["Cache-Control"]) == ("nosniff", "no-store")
    assert (said["X-Frame-Options"], said["Referrer-Policy"]) == ("DENY", "no-referrer")
    assert text(answer).encode() == page()


def test_the_policy_lets_this_script_and_this_style_run_and_nothing_else() -> None:
    rules = dict(rule.split(" ", 1) for rule in policy().split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert (rules["form-action"], rules["base-uri"]) == ("'none'", "'none'")
    assert "unsafe" not in policy() and "http" not in policy() and "*" not in policy()
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        [body] = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), page(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_the_page_asks_nobody_else() -> None:
    """No address but one of SVG's name, which is never fetched; nothing inline that the policy
    would stop; and no way for a text to become markup."""
    whole = page().decode()
    assert set(re.findall(r"https?://[^\s\"'`]+", whole)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"\s(?:src|style|on[a-z]+)=", whole) == []
    assert re.findall(r"url\(|@import|importScripts|sendBeacon|WebSocket", whole) == []
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\("
    assert re.findall(ways, whole) == []
    assert whole.count("<script>") == whole.count("</script>") == 1 and "<!--" not in whole


def test_the_page_is_built_of_what_readers_of_screens_know() -> None:
    whole = page().decode()
    assert '<html lang="en">' in whole and "<main" in whole and "<nav" in whole
    assert len(re.findall("<h1", whole)) == 1
    headings = dict(re.findall(r'<h2 id="([\w-]+)">([^<]+)<', whole))
    sections = re.findall(r'<section id="([\w-]+)" aria-labelledby="([\w-]+)"', whole)
    assert {label for _, label in sections} == set(headings)
    ids = re.findall(r'\bid="([\w-]+)"', whole)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([\w-]+)"', whole)) <= set(ids)
    assert set(re.findall(r'at\("([\w-]+)"\)', whole)) <= set(ids)
    for field in re.findall(r"<(?:input|select)\b[^>]*>", whole):
        assert re.search(r"<label[^>]*>[^<]*" + re.escape(field), whole), f"{field} has no label"
    assert "prefers-color-scheme: dark" in whole and "width=device-width" in whole


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_colour_of_text_is_legible_on_both_grounds(scheme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", page().decode(), re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", blocks[scheme]))
    for ground in ("page", "soft"):
        for name in ("ink", "dim", "good", "warn", "bad", "link"):
            pair = sorted((luminance(colours[ground]), luminance(colours[name])))
            ratio = (pair[1] + 0.05) / (pair[0] + 0.05)
            assert ratio >= 4.5, f"{name} on {ground}: {ratio:.2f} (WCAG 2.2 AA)"


def test_what_changes_is_sent(stack: ExitStack, subject: Subject) -> None:
    subject.document = {"job": '</script><img src=x onerror="alert(1)">\nevent: over\n', "step": 1}
    answer = ask(served(stack, subject), "/live")
    assert answer.getheader("Content-Type") == "text/event-stream"
    with closing(answer):
        assert answer.readline().startswith(b"retry: ") and answer.readline() == b"\n"
        assert answer.readline() == b"event: whole\n"
        data = answer.readline()
        assert json.loads(data.removeprefix(b"data: "))["whole"] == subject.document
        subject.document = {**subject.document, "step": 2}
        while b'"step"' not in (line := answer.readline()):
            assert line
        assert json.loads(line.removeprefix(b"data: "))["change"] == {"step": [2]}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/run?number=1", {"run": {"number": 1, "why": "</script>"}}),
        ("/run?number=2", None),
        ("/run?number=-1", None),
        ("/run?number=1e3", None),
        ("/run?number=" + "9" * 40, None),
        ("/run", None),
        ("/log?number=3&before=7", {"0": {"why": "before 7 of 3"}}),
        ("/log?number=3", None),
        ("/page.js", None),
        ("/../../etc/passwd", None),
    ],
)
def test_what_else_may_be_asked_for(
    path: str, found: Any, stack: ExitStack, subject: Subject
) -> None:
    answer = ask(served(stack, subject), path)
    if found is None:
        assert answer.status == 404 and "demo" not in text(answer)
    else:
        assert (answer.status, json.loads(text(answer))) == (200, found)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(method: str, stack: ExitStack, subject: Subject) -> None:
    answer = ask(served(stack, subject), "/", method)
    assert answer.status == 405 and "demo" not in text(answer)


def test_a_head_has_no_body(stack: ExitStack, subject: Subject) -> None:
    answer = ask(served(stack, subject), "/", "HEAD")
    assert answer.status == 200 and text(answer) == ""


# -- who gets it


def test_under_another_name_it_is_refused(stack: ExitStack, subject: Subject) -> None:
    site = served(stack, subject)
    for path in ("/", "/live", "/run?number=1", "/log?number=1&before=1", "/nothing"):
        answer = ask(site, path, Host="evil.example")
        assert answer.status == 403 and "demo" not in text(answer)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_where_others_reach_it_it_needs_a_token(
    host: str, stack: ExitStack, subject: Subject
) -> None:
    with pytest.raises(ConfigError, match="expected a loopback address, or a dashboard_token"):
        served(stack, subject, WebAddress(host, 0))


def test_with_a_token(stack: ExitStack, subject: Subject) -> None:
    site = served(stack, subject, parse_web_address("0.0.0.0:0"), TOKEN)
    for path in ("/", "/live", "/run?number=1", "/log?number=1&before=1", "/?token=wrong"):
        answer = ask(site, path)
        body = text(answer)
        assert answer.status == 401 and "demo" not in body and "KEEPSTEP_DASHBOARD_TOKEN" in body
    shown = "".join(f"%{byte:02x}" for byte in TOKEN.encode())
    answer = ask(site, f"/?token={shown}")
    assert (answer.status, answer.getheader("Location")) == (303, "/")
    cookie = answer.getheader("Set-Cookie") or ""
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and shown not in cookie
    assert TOKEN not in text(answer)
    assert ask(site, "/", Cookie=cookie.partition(";")[0]).status == 200
    bearer = f"Bearer {TOKEN}".encode().decode("latin-1")
    assert ask(site, "/run?number=1", Authorization=bearer).status == 200


def test_a_token_in_an_address_opens_nothing_but_the_page(
    stack: ExitStack, subject: Subject
) -> None:
    """Addresses end up in logs and histories: this one leads away from itself at once."""
    site = served(stack, subject, LOCAL, "a" * 16)
    assert ask(site, "/live?token=" + "a" * 16).status == 401
    assert ask(site, "/?token=" + "a" * 16).status == 303


# -- where


def test_without_an_address_the_first_free_port(stack: ExitStack, subject: Subject) -> None:
    first, second = served(stack, subject, None), served(stack, subject, None)
    assert first.address.host == second.address.host == "127.0.0.1"
    assert first.address.port != second.address.port
    near = range(FIRST_PORT, FIRST_PORT + PORTS)
    assert first.address.port in near and first.url == f"http://127.0.0.1:{first.address.port}/"


def test_a_port_that_is_taken_is_told(stack: ExitStack, subject: Subject) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = WebAddress("127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigError, match="dashboard_address: expected an address of this"):
            served(stack, subject, address)


def test_at_ipv6(stack: ExitStack, subject: Subject) -> None:
    try:
        site = served(stack, subject, WebAddress("::1", 0))
    except ConfigError as error:
        pytest.skip(f"no IPv6: {error}")
    connection = HTTPConnection("::1", site.address.port, timeout=30)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    assert site.url == f"http://[::1]:{site.address.port}/"


# -- how much


def test_as_many_pages_as_there_are_places_for(stack: ExitStack, subject: Subject) -> None:
    site = served(stack, subject)
    pages = []
    for _ in range(MAX_READERS):
        answer = ask(site, "/live")
        assert answer.status == 200 and answer.readline()
        pages.append(answer)
    assert ask(site, "/live").status == 503
    assert ask(site, "/").status == 200, "there is room for what is short"
    for answer in pages:
        answer.close()


def test_strangers_who_say_nothing_keep_nobody_out(stack: ExitStack, subject: Subject) -> None:
    site = served(stack, subject)
    for _ in range(3 * MAX_CONNECTIONS):
        stack.enter_context(socket.create_connection(("127.0.0.1", site.address.port)))
    assert ask(site, "/").status == 200


@pytest.mark.parametrize(
    "said",
    [
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /?" + b"&".join(b"token=1" for _ in range(500)) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: \xff\xfe;=;\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n",
    ],
    ids=["long", "heads", "version", "tls", "fields", "cookie", "bytes"],
)
def test_odd_requests_are_answered_or_hung_up_on(
    said: bytes, stack: ExitStack, subject: Subject, capfd: pytest.CaptureFixture[str]
) -> None:
    site = served(stack, subject, LOCAL, "a" * 16)
    with socket.create_connection(("127.0.0.1", site.address.port), timeout=30) as odd:
        odd.sendall(said)
        odd.shutdown(socket.SHUT_WR)
        got = b""
        try:
            while more := odd.recv(65536):
                got += more
        except ConnectionResetError:
            pass
    assert b" 200 " not in got.partition(b"\r\n")[0] and b"demo" not in got
    assert ask(site, "/").status == 401, "and it goes on"
    assert "Traceback" not in capfd.readouterr().err


def test_readers_hear_that_it_is_over(subject: Subject) -> None:
    with ExitStack() as stack:
        answer = ask(served(stack, subject), "/live")
        assert answer.readline()
    with closing(answer):
        assert b"event: over\n" in answer.read()
