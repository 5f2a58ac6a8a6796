"""The registry's 401 dance: challenges, tokens by repository and scope, Basic logins.

Written for the distribution project's token authentication and OAuth 2 refresh tokens. One instance
serves all threads of a client.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from smolbuild.core.clock import Clock
from smolbuild.core.errors import RegistryError
from smolbuild.model.reference import is_loopback
from smolbuild.registry.credentials import Credential, Credentials
from smolbuild.registry.problems import Refusal, refused

__all__ = [
    "Authorizer",
    "Challenge",
    "Exchange",
    "Scope",
    "parse_challenges",
    "pull_scope",
    "push_scope",
]

Scope = tuple[str, ...]
"""What a token must allow, as ``repository:<name>:<actions>`` entries; sorted."""

_DEFAULT_LIFETIME = 60.0
_MAX_LIFETIME = 3600.0
_MARGIN = 0.2
"""The last part of a token's life in which it is no longer used."""
_CLIENT_ID = "smolbuild"
_MAX_TOKEN = 64 * 1024
_SCHEME = re.compile(r"(?:^|,)\s*(Basic|Bearer)(?=\s|,|$)", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-zA-Z]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """One challenge of a ``WWW-Authenticate`` header; ``scheme`` is ``basic`` or ``bearer``."""

    scheme: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a token service answered."""

    status: int
    body: bytes


Exchange = Callable[[str, str, Mapping[str, str], bytes | None], Answer]
"""Sends (method, url, headers, body) to a token service, with retries and a bounded answer."""


@dataclass(slots=True)
class _Granted:
    header: str
    expires: float


def pull_scope(repository: str) -> Scope:
    """Return the scope for reading ``repository``."""
    return (f"repository:{repository}:pull",)


def push_scope(repository: str, *sources: str) -> Scope:
    """Return the scope for writing ``repository``, mounting from ``sources`` included."""
    return tuple(
        sorted([f"repository:{repository}:pull,push", *(s for n in sources for s in pull_scope(n))])
    )


def parse_challenges(header: str) -> tuple[Challenge, ...]:
    """Parse a ``WWW-Authenticate`` header; unknown schemes and malformed parts are left out."""
    quoted = [match.span() for match in re.finditer(r'"(?:[^"\\]|\\.)*"', header)]
    marks = [
        match
        for match in _SCHEME.finditer(header)
        if not any(start <= match.start(1) < end for start, end in quoted)
    ]
    challenges = []
    ends = [mark.start() for mark in marks[1:]] + [len(header)]
    for mark, end in zip(marks, ends, strict=False):
        part = header[mark.end() : end]
        parameters = {
            name.lower(): re.sub(r"\\(.)", r"\1", text) if text else bare
            for name, text, bare in _PARAMETER.findall(part)
        }
        challenges.append(Challenge(scheme=mark[1].lower(), parameters=parameters))
    return tuple(challenges)


class Authorizer:
    """Holds a client's tokens and gets new ones; safe to use from any thread.

    A token is kept per scope, so a token for reading is never tried for writing. Secrets are sent
    only to the registry itself and to the token service that it names, never in the clear unless
    the registry itself is spoken to in the clear.
    """

    def __init__(
        self, *, registry: str, credentials: Credentials, plain_http: bool, clock: Clock
    ) -> None:
        self._registry = registry
        self._credentials = credentials
        self._plain_http = plain_http
        self._clock = clock
        self._lock = threading.Lock()
        self._granted: dict[Scope, _Granted] = {}
        self._challenges: dict[Scope, Challenge] = {}
        self._asked = False
        self._login: Credential | None = None

    def current(self, scope: Scope, exchange: Exchange) -> str | None:
        """Return the ``Authorization`` header to send, or None while none is known to be needed.

        A token that is about to expire is replaced first: a long upload must not begin with it.
        """
        with self._lock:
            granted = self._granted.get(scope)
            if granted is None or self._clock.monotonic() < granted.expires:
                return granted.header if granted else None
            challenge = self._challenges[scope]
            return self._grant(scope, challenge, exchange)

    def answer(self, header: str, scope: Scope, used: str | None, exchange: Exchange) -> str:
        """Return a new ``Authorization`` header after a 401 with ``header`` as its challenge.

        ``used`` is the header that was refused: when another thread has replaced it meanwhile, the
        new one is returned without asking again.

        Raises:
            RegistryError: code ``unauthorized``: no login is known, or it is refused.

        """
        with self._lock:
            granted = self._granted.get(scope)
            if granted is not None and granted.header != used:
                return granted.header
            challenges = parse_challenges(header)
            for scheme in ("bearer", "basic"):
                for challenge in challenges:
                    if challenge.scheme == scheme:
                        return self._grant(scope, challenge, exchange, refused_header=used)
        raise self._unauthorized("its challenge is not understood")

    def _grant(
        self,
        scope: Scope,
        challenge: Challenge,
        exchange: Exchange,
        refused_header: str | None = None,
    ) -> str:
        self._granted.pop(scope, None)
        if not self._asked:
            self._login = self._credentials.lookup(self._registry)
            self._asked = True
        login = self._login
        if login is not None and login.registry_token:
            granted = _Granted(f"Bearer {login.registry_token}", float("inf"))
        elif challenge.scheme == "basic":
            if login is None or not login.username:
                raise self._unauthorized("no login for it is known")
            granted = _Granted(login.basic, float("inf"))
        else:
            granted = self._fetch(scope, challenge, login, exchange)
        if granted.header == refused_header:
            raise self._unauthorized("the login is refused")
        self._granted[scope] = granted
        self._challenges[scope] = challenge
        return granted.header

    def _fetch(
        self, scope: Scope, challenge: Challenge, login: Credential | None, exchange: Exchange
    ) -> _Granted:
        realm = challenge.parameters.get("realm", "")
        self._check_realm(realm)
        scopes = scope or tuple(challenge.parameters.get("scope", "").split())
        fields = [("service", challenge.parameters.get("service", ""))]
        fields += [("scope", entry) for entry in scopes]
        fields = [(key, text) for key, text in fields if text]
        headers = {"Accept": "application/json"}
        if login is not None and login.identity_token:
            form = [
                ("grant_type", "refresh_token"),
                ("client_id", _CLIENT_ID),
                ("refresh_token", login.identity_token),
                *[(key, text) for key, text in fields if key != "scope"],
                ("scope", " ".join(scopes)),
            ]
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            answer = exchange("POST", realm, headers, urlencode(form).encode())
        else:
            if login is not None and login.username:
                headers["Authorization"] = login.basic
            joint = "&" if "?" in realm else "?"
            answer = exchange("GET", realm + joint + urlencode(fields), headers, None)
        return self._parse(answer)

    def _parse(self, answer: Answer) -> _Granted:
        if answer.status in {400, 401, 403}:
            raise self._unauthorized("the token service refuses the login")
        if answer.status != 200:
            raise refused(
                Refusal(status=answer.status), registry=self._registry, what="request for a token"
            )
        try:
            value = json.loads(answer.body)
            token = value.get("token") or value.get("access_token")
            lifetime = value.get("expires_in", _DEFAULT_LIFETIME)
        except (ValueError, AttributeError, RecursionError):
            token, lifetime = None, 0
        if not isinstance(token, str) or not _TOKEN.fullmatch(token) or len(token) > _MAX_TOKEN:
            raise RegistryError(
                f"the token service of {self._registry} gave no usable token", code="token"
            )
        if not isinstance(lifetime, int | float) or not lifetime > 0:
            lifetime = _DEFAULT_LIFETIME
        usable = min(lifetime, _MAX_LIFETIME) * (1 - _MARGIN)
        return _Granted(f"Bearer {token}", self._clock.monotonic() + usable)

    def _check_realm(self, realm: str) -> None:
        try:
            parts = urlsplit(realm)
            host = parts.netloc
        except ValueError:
            parts, host = urlsplit(""), ""
        clear_allowed = self._plain_http or is_loopback(host)
        if not host or not (parts.scheme == "https" or (parts.scheme == "http" and clear_allowed)):
            raise RegistryError(
                f"{self._registry} names a token service that cannot be used safely",
                hint="a registry that is reached over https must have its token service there too",
                code="token",
            )

    def _unauthorized(self, why: str) -> RegistryError:
        error = refused(Refusal(status=401), registry=self._registry, what="request")
        return RegistryError(
            f"{self._registry} wants a login: {why}", hint=error.hint, code=error.code
        )
