"""Whom the server answers: hosts and origins of its own, and who has the key."""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tigon.serve.protocol import RequestError
from tigon.utils.json import quote

KEY_VARIABLE = "TIGON_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # as a browser names this machine
OPEN_PATHS = ("/", "/health", "/metrics")  # need no key
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


def check_address(host: str, key: str | None) -> bool:
    """Returns whether only this machine reaches an address; raises ValueError for a blank key,
    and if others reach it and there is no key."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may mean any address
        loopback = False
    if key and not key.strip():
        raise ValueError(f"{KEY_VARIABLE} is blank: set it to a key, or leave it out")
    if not loopback and not key:
        raise ValueError(
            f"--host {host}: others than this machine could reach it, so it needs a key: set "
            f"{KEY_VARIABLE} in the environment, or leave --host out"
        )
    return loopback


class Guard:
    """Refuses requests before they reach the app.

    A page of another site must not use the server through a visitor's browser: `Origin` must be the
    server itself, and on a loopback address `Host` must name this machine, which a name that
    another site has pointed here does not; requests of HTTP/1.0 may have none, which no browser
    sends. With a key, all but OPEN_PATHS need it.
    """

    def __init__(
        self, app: App, refuse: Callable[[RequestError], App], key: str | None, local: bool
    ):
        self.app, self.refuse, self.local = app, refuse, local
        self.key = key.encode() if key else None

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes a request on, or answers it by a refusal."""
        app = self.app
        if scope["type"] == "http":
            try:
                self.check(scope)
            except RequestError as error:
                app = self.refuse(error)
        await app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raises RequestError with status 403 for another site, and 401 for a wrong key."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        named = "host" in headers or scope["http_version"] != "1.0"
        if self.local and named and _split(f"//{host}", "hostname") not in LOOPBACK:
            raise RequestError(f"Host {quote(host)} is not this machine", status=403)
        if origin is not None and _split(origin, "netloc") != host.lower():
            raise RequestError(f"Origin {quote(origin)} is another site", status=403)
        if self.key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            known = hmac.compare_digest(key.strip().encode("latin-1"), self.key)
            if scheme.lower() != "bearer" or not known:
                raise RequestError(
                    "the key is missing or wrong: send it as Authorization: Bearer KEY",
                    status=401,
                    code="invalid_api_key",
                )


def _split(url: str, part: str) -> str:
    """Returns a part of a URL in lower case; empty if it has none."""
    try:
        return (getattr(urlsplit(url), part) or "").lower()
    except ValueError:
        return ""
