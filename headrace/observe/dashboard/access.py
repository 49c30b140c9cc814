"""Decide who may ask: this machine only, or whoever has the key; and what a page may do.

Requests under a foreign host name are refused, so that a page elsewhere cannot reach the dashboard by pointing its own
name at this machine (DNS rebinding). Answers carry a content security policy under which only our own files run.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import ConfigError

KEY_VARIABLE = "HEADRACE_DASHBOARD_KEY"
SHORTEST_KEY = 16  # characters
COOKIE = "headrace_dashboard"
LOCAL = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/", "/login", "/static/dashboard.css", "/static/dashboard.js", "/static/charts.js", "/static/pages.js")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


def check_listening(host: str, key: str | None) -> None:
    """Raise ConfigError for an address beyond this machine without a key, and for a key that is easily guessed."""
    if key is not None and len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"the key has {len(key)} characters: give one of at least {SHORTEST_KEY}, which nobody guesses"
        )
    if key is None and not is_local(host):
        raise ConfigError(
            f"listening on {host} without a key would show the runs to everybody: give one with --key or "
            f"{KEY_VARIABLE}, or listen on 127.0.0.1"
        )


def is_local(host: str) -> bool:
    """Tell whether an address is of this machine alone."""
    if host in LOCAL:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """Return the name of a Host header, without the port.

    >>> host_name("localhost:8080"), host_name("[::1]:80"), host_name("evil.example")
    ('localhost', '::1', 'evil.example')
    """
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:\[\]]*)(?::\d+)?", header.strip())
    return "" if match is None else (match[1] or match[2] or "").lower()


class Gate:
    """Lets requests through that may be answered, and adds the headers that keep a page harmless.

    A browser that has sent the key once gets a cookie for as long as this process lives; programs send the key as a
    bearer token. Both are compared in constant time.
    """

    def __init__(self, app: ASGIApp, *, host: str, key: str | None) -> None:
        check_listening(host, key)
        self._app, self._key, self._local = app, key, is_local(host)
        self._secret = secrets.token_bytes(32)

    @property
    def needs_key(self) -> bool:
        return self._key is not None

    def cookie_for(self, key: str) -> str | None:
        """Return the value of the cookie for the right key; None for a wrong one."""
        if self._key is None or not _equal(key, self._key):
            return None
        return self._cookie()

    def _cookie(self) -> str:
        assert self._key is not None
        return hmac.new(self._secret, self._key.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answered.setdefault(name, value)
            await send(message)

        refused = self._refusal(scope, headers)
        if refused is not None:
            status, sentence = refused
            await JSONResponse({"error": sentence}, status_code=status)(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the sentence with which a request is refused; None if it may pass."""
        name = host_name(headers.get("host", ""))
        if self._local and not is_local(name):
            return 421, "this dashboard answers to localhost and 127.0.0.1 only"
        if not name:
            return 400, "a request needs a Host"
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        if site not in ("same-origin", "none") and mode != "navigate":
            return 403, "requests of other sites are refused"
        if scope["method"] not in ("GET", "HEAD") and scope["path"] != "/login":
            return 405, "the dashboard only reads"
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        return None if self._has_key(headers) else (401, "the key is missing or wrong")

    def _has_key(self, headers: Headers) -> bool:
        assert self._key is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(token.strip(), self._key):
            return True
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
        return _equal(cookies.get(COOKIE, ""), self._cookie())


def _equal(given: str, right: str) -> bool:
    """Compare two secrets in a time that does not depend on where they differ, nor on their lengths."""
    digests = [hashlib.sha256(text.encode(errors="surrogateescape")).digest() for text in (given, right)]
    return hmac.compare_digest(*digests)
