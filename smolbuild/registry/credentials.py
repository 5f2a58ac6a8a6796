"""Docker's credentials: ``config.json``, credential helpers, identity tokens; only ever read.

The file is the one ``docker login`` writes: ``$DOCKER_CONFIG/config.json``, else
``~/.docker/config.json``.
"""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smolbuild.core import process
from smolbuild.core.errors import HostError, RegistryError, UsageError
from smolbuild.model.reference import DOCKER_HUB
from smolbuild.registry.problems import printable

__all__ = ["Credential", "Credentials", "load_credentials"]

_HUB_KEYS = ("https://index.docker.io/v1/", "docker.io", "index.docker.io", "registry-1.docker.io")
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_TIMEOUT = 30.0
_MAX_CONFIG = 4 * 1024 * 1024
_NOT_FOUND = b"credentials not found"
_TOKEN_USER = "<token>"  # noqa: S105 - Docker's marker for an identity token, not a secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A login for one registry; its secrets appear in no representation."""

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    """An OAuth 2 refresh token, used instead of user name and password."""
    registry_token: str = field(default="", repr=False)
    """A bearer token that is sent as it is."""

    @property
    def basic(self) -> str:
        """The value of a Basic ``Authorization`` header."""
        pair = f"{self.username}:{self.password}".encode()
        return "Basic " + base64.b64encode(pair).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The parsed ``config.json``; empty when there is none."""

    source: str = ""
    auths: Mapping[str, Credential] = field(default_factory=dict, repr=False)
    """By host, with any scheme and API path taken off."""
    helpers: Mapping[str, str] = field(default_factory=dict)
    """``credHelpers``: host to the name of a program ``docker-credential-…``."""
    store: str = ""
    """``credsStore``: the helper for every other host."""

    def lookup(self, registry: str) -> Credential | None:
        """Return the login for ``registry``, or None: go on without one.

        May run a credential helper (deadline 30 s), so ask only when the registry wants a login.

        Raises:
            RegistryError: the helper failed (code ``credential-helper``).

        """
        keys = _HUB_KEYS if registry == DOCKER_HUB else (registry,)
        for key in keys:
            helper = self.helpers.get(key) or self.helpers.get(_host(key))
            if helper:
                return _ask_helper(helper, key)
        if self.store:
            for key in keys:
                found = _ask_helper(self.store, key)
                if found is not None:
                    return found
        return next((self.auths[host] for host in map(_host, keys) if host in self.auths), None)


def load_credentials(environment: Mapping[str, str]) -> Credentials:
    """Read Docker's configuration as ``environment`` names it; a missing file means no logins.

    Raises:
        UsageError: the file exists and is not what Docker writes.

    """
    directory = environment.get("DOCKER_CONFIG")
    home = environment.get("HOME")
    if directory:
        path = Path(directory) / "config.json"
    elif home:
        path = Path(home) / ".docker" / "config.json"
    else:
        return Credentials()
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_CONFIG + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Credentials()
    except OSError as error:
        raise _bad_config(path, error.strerror or "it cannot be read") from error
    return _parse(path, data)


def _parse(path: Path, data: bytes) -> Credentials:
    if len(data) > _MAX_CONFIG:
        raise _bad_config(path, "it is too large")
    try:
        value = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError) as error:
        # The parser's message may quote the file, so it is not passed on.
        raise _bad_config(path, "it is not JSON") from error
    if not isinstance(value, dict):
        raise _bad_config(path, "it is not a JSON object")
    auths = value.get("auths") or {}
    helpers = value.get("credHelpers") or {}
    store = value.get("credsStore") or ""
    if not isinstance(auths, dict) or not isinstance(helpers, dict) or not isinstance(store, str):
        raise _bad_config(path, "auths, credHelpers or credsStore has the wrong type")
    for name in [*helpers.values(), *([store] if store else [])]:
        if not isinstance(name, str) or not _HELPER.fullmatch(name):
            raise _bad_config(path, "the name of a credential helper is malformed")
    logins = {}
    for key, entry in auths.items():
        login = _login(path, entry)
        if login is not None:
            logins[_host(key)] = login
    return Credentials(source=str(path), auths=logins, helpers=helpers, store=store)


def _login(path: Path, entry: object) -> Credential | None:
    if not isinstance(entry, dict):
        raise _bad_config(path, "an entry of auths is not an object")
    texts = {
        key: entry.get(key) or ""
        for key in ("auth", "username", "password", "identitytoken", "registrytoken")
    }
    if not all(isinstance(text, str) for text in texts.values()):
        raise _bad_config(path, "an entry of auths has the wrong type")
    username, password = texts["username"], texts["password"]
    if texts["auth"]:
        try:
            pair = base64.b64decode(texts["auth"], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError) as error:
            raise _bad_config(path, "an auth entry is not base64") from error
        username, _, password = pair.rstrip("\0").partition(":")
    if not (username or texts["identitytoken"] or texts["registrytoken"]):
        return None
    return Credential(
        username=username,
        password=password,
        identity_token=texts["identitytoken"],
        registry_token=texts["registrytoken"],
    )


def _ask_helper(name: str, server: str) -> Credential | None:
    program = f"docker-credential-{name}"
    try:
        done = process.run([program, "get"], timeout=_HELPER_TIMEOUT, stdin=server.encode())
    except HostError as error:
        raise RegistryError(
            f"the credential helper {program} could not be run: {error.message}",
            hint="install it, or take it out of Docker's config.json",
            code="credential-helper",
        ) from error
    if done.status != 0:
        if _NOT_FOUND in done.stdout or _NOT_FOUND in done.stderr:
            return None
        said = printable((done.stderr or done.stdout).decode(errors="replace"))
        raise RegistryError(
            f"the credential helper {program} failed with status {done.status}: {said}",
            hint=f"log in to {server} again",
            code="credential-helper",
        )
    try:
        value = json.loads(done.stdout)
        username, secret = value["Username"], value["Secret"]
    except (ValueError, KeyError, TypeError, RecursionError):
        username = secret = None
    if not isinstance(username, str) or not isinstance(secret, str):
        # The output holds the secret: neither it nor the parser's error is passed on.
        raise RegistryError(
            f"the credential helper {program} gave no usable answer", code="credential-helper"
        )
    if username == _TOKEN_USER:
        return Credential(identity_token=secret)
    return Credential(username=username, password=secret)


def _host(key: str) -> str:
    host = key.removeprefix("https://").removeprefix("http://").rstrip("/")
    return host.removesuffix("/v1").removesuffix("/v2")


def _bad_config(path: Path, problem: str) -> UsageError:
    return UsageError(
        f"cannot use Docker's configuration {path}: {problem}",
        hint="repair it with `docker login`, or point DOCKER_CONFIG to another directory",
        code="docker-config",
    )
