"""Web: the dashboard over HTTP, as a WSGI application and the server that runs it.

| path | answer |
|---|---|
| `/` | the page: one document of HTML with its style and script in it |
| `/live` | server-sent events: `whole`, then a `change` at each look, `over` at the end |
| `/run?number=N` | a run of the job as JSON, and its account |
| `/log?number=N&before=K` | the lines of that run's log before line K |

Comes in: requests, a feed, a function for what is asked for seldom. Goes out: answers to who may
have them (`access.py`). Nothing can be changed by any request.

Invariant: the page loads nothing but itself and from nowhere but here. Its policy allows the one
script and the one style whose hashes it names, and connections to where it came from.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from keepstep.dashboard.access import Access, PageRefusal, Request
from keepstep.dashboard.feed import Feed
from keepstep.edge.net.bounded_http import BoundedServer, serve
from keepstep.errors import ConfigError
from keepstep.model.web_address import LOOPBACK, WebAddress

FIRST_PORT, PORTS = 8610, 20  # those that are tried where nobody names one
MAX_NUMBER = 10**9
MAX_FIELDS = 8
HTML, TEXT, JSON = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json"
EVENTS = "text/event-stream"

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Asked = Callable[[int, int | None], dict[str, Any] | None]


@cache
def page() -> bytes:
    """The whole page."""
    parts = {name: _part(f"page.{name}") for name in ("css", "js")}
    text = _part("page.html")
    for name, part in parts.items():
        text = text.replace(f"/* page.{name} */", part)
    return text.encode()


@cache
def policy() -> str:
    """What a browser may do on the page's behalf."""
    script, style = (_hash(_part(name)) for name in ("page.js", "page.css"))
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{script}'",
            f"style-src '{style}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _part(name: str) -> str:
    return (files("keepstep.dashboard") / "page" / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def headers(kind: str) -> list[tuple[str, str]]:
    """Of every answer."""
    return [
        ("Content-Type", kind),
        ("Content-Security-Policy", policy()),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Frame-Options", "DENY"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    ]


class Site:
    """The application. `run_of`, `log_of`: of a run by its number; None where there is none."""

    def __init__(self, access: Access, feed: Feed, run_of: Asked, log_of: Asked) -> None:
        self._access = access
        self._feed = feed
        self._run_of = run_of
        self._log_of = log_of

    def __call__(self, request: Request, start: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if request["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refused(
                start, PageRefusal("405 Method Not Allowed", "Only GET is answered here.")
            )
        path = request.get("PATH_INFO", "/")
        try:
            asked = parse_qs(str(request.get("QUERY_STRING", "")), max_num_fields=MAX_FIELDS)
        except ValueError:
            return _refused(
                start, PageRefusal("400 Bad Request", "That asks for too much at once.")
            )
        token = asked.get("token", [""])[0].encode("utf-8", "replace")
        if path == "/" and token and self._access.is_token(token):
            return self._let_in(start)
        refusal = self._access.refusal(request)
        if refusal is not None:
            return _refused(start, refusal)
        if request["REQUEST_METHOD"] == "HEAD":
            start("200 OK", headers(HTML))
            return []
        return self._answer(str(path), asked, start)

    def _answer(
        self, path: str, asked: dict[str, list[str]], start: StartResponse
    ) -> Iterable[bytes]:
        if path == "/":
            start("200 OK", headers(HTML))
            return [page()]
        if path == "/live":
            return self._live(start)
        if path in ("/run", "/log"):
            number, before = _number(asked, "number"), _number(asked, "before")
            find = self._run_of if path == "/run" else self._log_of
            found = None if number is None else find(number, before)
            if found is not None:
                start("200 OK", headers(JSON))
                return [json.dumps(found).encode("ascii")]
        return _refused(start, PageRefusal("404 Not Found", "There is nothing here."))

    def _let_in(self, start: StartResponse) -> Iterable[bytes]:
        """Once with the token in the address, from then on with a cookie."""
        access = self._access
        cookie = f"{access.cookie}={access.proof}; Path=/; HttpOnly; SameSite=Lax"
        start("303 See Other", [*headers(TEXT), ("Location", "/"), ("Set-Cookie", cookie)])
        return [b"The page is at /.\n"]

    def _live(self, start: StartResponse) -> Iterator[bytes] | list[bytes]:
        if self._feed.is_full():
            many = PageRefusal("503 Service Unavailable", "As many pages as are served are open.")
            return _refused(start, many)
        start("200 OK", headers(EVENTS))
        return self._feed.read()


def _refused(start: StartResponse, refusal: PageRefusal) -> list[bytes]:
    start(refusal.status, headers(TEXT))
    return [f"{refusal.why}\n".encode()]


def _number(asked: dict[str, list[str]], name: str) -> int | None:
    text = asked.get(name, [""])[0]
    is_number = text.isascii() and text.isdecimal() and len(text) < len(str(MAX_NUMBER))
    return int(text) if is_number else None


class Served:
    """A site that is served on a thread of its own, until `close`."""

    def __init__(
        self,
        address: WebAddress | None,
        token: str | None,
        feed: Feed,
        run_of: Asked,
        log_of: Asked,
    ) -> None:
        """`address` None: a free port of loopback. Raises ConfigError."""
        if address is not None:
            check_token(address, token)
        self._feed = feed
        self._site: Site | None = None
        self._server = _bound(address, self._application)
        host = LOOPBACK if address is None else address.host
        self.address = WebAddress(host, self._server.server_port)
        self._site = Site(Access(self.address, token), feed, run_of, log_of)
        self._thread = threading.Thread(target=self._server.serve_forever, name="keepstep-page")
        self._thread.daemon = True
        self._thread.start()

    def _application(self, request: Request, start: StartResponse) -> Iterable[bytes]:
        assert self._site is not None
        return self._site(request, start)

    @property
    def url(self) -> str:
        """Where a browser of this machine finds it. Without the token."""
        return f"http://{self.address}/"

    def close(self) -> None:
        """Tell who reads that it is over, and hang up."""
        self._feed.close()
        self._server.close()
        self._thread.join()


def check_token(address: WebAddress, token: str | None) -> None:
    """Raises ConfigError where strangers could read."""
    if token is None and not address.is_loopback:
        raise ConfigError(
            "dashboard_address: expected a loopback address, or a dashboard_token, found "
            f"{address} and no token: others reach that address. Set KEEPSTEP_DASHBOARD_TOKEN "
            "(openssl rand -hex 16), or serve it at 127.0.0.1 and use a tunnel (ssh -L)"
        )


def _bound(address: WebAddress | None, application: Any) -> BoundedServer:
    """Raises ConfigError."""
    if address is not None:
        try:
            return serve(application, address.host, address.port)
        except OSError as error:
            raise ConfigError(
                f"dashboard_address: expected an address of this node with a free port, found "
                f"{address}: {error}"
            ) from error
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        try:
            return serve(application, LOOPBACK, port)
        except OSError:
            continue
    return serve(application, LOOPBACK, 0)
