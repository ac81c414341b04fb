"""Access: who may read the dashboard.

Comes in: a request, as WSGI has it. Goes out: None, or why it is refused.

* With a token, wherever it is served: whoever shows it, in a cookie or as a bearer. It is compared
  in constant time. The page's address may carry it once (`/?token=...`): the answer puts it into a
  cookie that scripts cannot read, and leads to the address without it.
* Without one, at a loopback address: processes of this user and of root, by the kernel's own table.
  A browser is asked under which name it came, so that a stranger's page whose name leads here
  ("DNS rebinding") is refused.
* What another site's page asks for by itself is refused in any case.

Invariant: nothing of the job is said to who is refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any

from keepstep.edge.net.peer_user import user_of_peer
from keepstep.model.web_address import WebAddress

Request = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PageRefusal:
    """status: of HTTP. why: what a person reads."""

    status: str
    why: str


@dataclass(frozen=True, slots=True)
class Access:
    """To a page served at `address`, its port settled."""

    address: WebAddress
    token: str | None
    user: int = -1
    user_of: Callable[[tuple[str, int], tuple[str, int]], int | None] = user_of_peer

    @property
    def cookie(self) -> str:
        """Its name: browsers share cookies between the ports of a host."""
        return f"keepstep-{self.address.port}"

    def is_token(self, shown: bytes) -> bool:
        """In a time that does not tell how much of it is right."""
        return self.token is not None and hmac.compare_digest(shown, self.token.encode())

    @property
    def proof(self) -> str:
        """What the cookie holds: proves the token, and is none, so it may have any characters."""
        assert self.token is not None
        return hmac.new(self.token.encode(), b"keepstep dashboard", "sha256").hexdigest()

    def refusal(self, request: Request) -> PageRefusal | None:
        """Why this request is not answered."""
        if request.get("HTTP_SEC_FETCH_SITE") == "cross-site" and not _is_navigation(request):
            return PageRefusal("403 Forbidden", "Another site's page may not ask for this.")
        return self._without_token(request) if self.token is None else self._with_token(request)

    def _with_token(self, request: Request) -> PageRefusal | None:
        scheme, _, shown = str(request.get("HTTP_AUTHORIZATION", "")).partition(" ")
        if scheme.lower() == "bearer" and self.is_token(shown.strip().encode("latin-1")):
            return None
        if hmac.compare_digest(_cookie(request, self.cookie).encode(), self.proof.encode()):
            return None
        return PageRefusal(
            "401 Unauthorized",
            "This is a job's dashboard, and shows itself for the job's token: open "
            "/?token=TOKEN here once, TOKEN being what KEEPSTEP_DASHBOARD_TOKEN was set to.",
        )

    def _without_token(self, request: Request) -> PageRefusal | None:
        if not _is_own_name(str(request.get("HTTP_HOST", ""))):
            return PageRefusal(
                "403 Forbidden",
                "Expected to be asked as localhost or a loopback address, found another name: a "
                "page of somebody else's may have led here. Set KEEPSTEP_DASHBOARD_TOKEN to use "
                "other names.",
            )
        peer = (str(request["REMOTE_ADDR"]), int(request["REMOTE_PORT"]))
        here = (str(request["LOCAL_ADDR"]), self.address.port)
        user = self.user_of(peer, here)
        own = os.getuid() if self.user < 0 else self.user
        if user in (own, 0):
            return None
        found = "one that the kernel does not name" if user is None else f"user {user}"
        return PageRefusal(
            "403 Forbidden",
            f"Expected a process of user {own}, found {found}. Set KEEPSTEP_DASHBOARD_TOKEN to "
            "let others in.",
        )


def _is_navigation(request: Request) -> bool:
    """Whether a person follows a link: nobody else sees what comes back."""
    return (
        request.get("HTTP_SEC_FETCH_MODE") == "navigate"
        and request.get("HTTP_SEC_FETCH_DEST") == "document"
    )


def _cookie(request: Request, name: str) -> str:
    """Empty where there is none."""
    try:
        found = SimpleCookie(str(request.get("HTTP_COOKIE", ""))).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _is_own_name(host: str) -> bool:
    """Whether a request came under a name that only this machine has."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
