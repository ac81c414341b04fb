"""Who may read the dashboard, and who may not."""

from __future__ import annotations

import contextlib
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.dashboard import access as access_module
from keepstep.dashboard.access import Access
from keepstep.errors import ConfigError
from keepstep.model.web_address import WebAddress, parse_web_address

LOCAL = WebAddress("127.0.0.1", 8610)
TOKEN = 'a token; with "odd" characters, € among them'
US, ROOT, EVE = 1000, 0, 4242


def asked(host: str = "localhost:8610", **more: str) -> dict[str, Any]:
    ends = {"REMOTE_ADDR": "127.0.0.1", "REMOTE_PORT": "5000", "LOCAL_ADDR": "127.0.0.1"}
    return {**ends, "HTTP_HOST": host, **more}


def local(user: int | None) -> Access:
    """As it is asked by that user's process."""

    def user_of(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
        assert (peer, here) == (("127.0.0.1", 5000), ("127.0.0.1", 8610))
        return user

    return Access(LOCAL, None, user=US, user_of=user_of)


@pytest.mark.parametrize(("user", "is_in"), [(US, True), (ROOT, True), (EVE, False), (None, False)])
def test_on_this_machine_the_user_and_root(user: int | None, is_in: bool) -> None:
    refusal = local(user).refusal(asked())
    assert (refusal is None) == is_in
    if refusal is not None:
        assert refusal.status.startswith("403") and f"user {US}" in refusal.why


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *((name, True) for name in ("localhost", "LOCALHOST:9000", "127.0.0.1:1", "127.8.8.8")),
        *((name, True) for name in ("[::1]:8610", "[::1]")),
        *((name, False) for name in ("evil.example:8610", "localhost.evil.example", "10.0.0.7")),
        *((name, False) for name in ("", "[::2]:8610", "127.0.0.1.evil.example", "[fe80::1]")),
    ],
)
def test_under_names_of_this_machine_alone(host: str, is_own: bool) -> None:
    """A page of somebody else's can have its name lead to 127.0.0.1."""
    refusal = local(US).refusal(asked(host))
    assert (refusal is None) == is_own


def test_with_a_token_whoever_shows_it() -> None:
    access = Access(WebAddress("10.0.0.7", 8610), TOKEN, user=US)
    bearer = f"Bearer {TOKEN}".encode().decode("latin-1")  # as WSGI has headers
    assert access.refusal(asked("any.name", HTTP_AUTHORIZATION=bearer)) is None
    cookie = f"other=1; {access.cookie}={access.proof}"
    assert access.refusal(asked("any.name", HTTP_COOKIE=cookie)) is None
    assert access.is_token(TOKEN.encode())
    for wrong in (
        asked(),
        asked(HTTP_AUTHORIZATION="Bearer "),
        asked(HTTP_AUTHORIZATION=f"Basic {TOKEN}".encode().decode("latin-1")),
        asked(HTTP_COOKIE=f"{access.cookie}={access.proof[:-1]}"),
        asked(HTTP_COOKIE=f"{access.cookie}="),
        asked(HTTP_COOKIE=f"keepstep-1={access.proof}"),
        asked(HTTP_COOKIE="=;;=\x00"),
    ):
        refusal = access.refusal(wrong)
        assert refusal is not None and refusal.status.startswith("401")
        assert TOKEN not in refusal.why


def test_a_token_is_asked_for_on_this_machine_too_where_there_is_one() -> None:
    refusal = Access(LOCAL, TOKEN, user=US, user_of=lambda peer, here: US).refusal(asked())
    assert refusal is not None and refusal.status.startswith("401")


def test_nobody_can_have_an_empty_token() -> None:
    access = local(US)
    assert not access.is_token(b"")


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    really = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return really(one, other)

    monkeypatch.setattr(access_module.hmac, "compare_digest", compare)
    access = Access(LOCAL, TOKEN)
    access.is_token(b"guess")
    access.refusal(asked(HTTP_COOKIE=f"{access.cookie}=guess"))
    assert compared == [(b"guess", TOKEN.encode()), (b"guess", access.proof.encode())]


@pytest.mark.parametrize(
    ("site", "mode", "kind", "is_in"),
    [
        ("same-origin", "cors", "empty", True),
        ("none", "navigate", "document", True),
        ("cross-site", "navigate", "document", True),  # a link in a chat
        ("cross-site", "navigate", "iframe", False),
        ("cross-site", "no-cors", "script", False),
        ("cross-site", "cors", "empty", False),
    ],
)
def test_another_sites_page_asks_for_nothing(site: str, mode: str, kind: str, is_in: bool) -> None:
    fetched = {
        "HTTP_SEC_FETCH_SITE": site,
        "HTTP_SEC_FETCH_MODE": mode,
        "HTTP_SEC_FETCH_DEST": kind,
    }
    assert (local(US).refusal(asked(**fetched)) is None) == is_in


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("8610", "127.0.0.1", 8610, True),
        ("0", "127.0.0.1", 0, True),
        ("localhost:80", "localhost", 80, True),
        ("127.1.2.3:80", "127.1.2.3", 80, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("[::]:80", "::", 80, False),
        ("10.0.0.7:80", "10.0.0.7", 80, False),
        ("node-3.cluster:80", "node-3.cluster", 80, False),
        ("localhost.evil:80", "localhost.evil", 80, False),
    ],
)
def test_an_address_as_a_person_writes_it(
    text: str, host: str, port: int, is_loopback: bool
) -> None:
    address = parse_web_address(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, is_loopback)
    assert parse_web_address(str(address)) == address


NO_ADDRESSES = [
    *("", "train.py", ":80", "host:", "host:port", "::1:80", "[10.0.0.7]:80", "a b:80", "1:2:3"),
    *("127.0.0.1:65536", "127.0.0.1:-1", "http://127.0.0.1:80", "[]:80", "²:80", "h:\u0661"),
]


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"dashboard_address: expected a port, or HOST:PORT"):
        parse_web_address(text)


@given(st.text(max_size=12))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_web_address(text).port <= 65535
