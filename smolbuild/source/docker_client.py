"""A Docker engine through the docker package.

The engine is found as the ``docker`` command finds it: ``DOCKER_HOST`` with its TLS variables, else
the current context, else the usual socket. The package is loaded at the first question, so a build
that asks no engine does not pay for it.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from smolbuild.core.digest import Digest, parse_digest
from smolbuild.core.errors import BuildError, HostError, SmolbuildError, UsageError
from smolbuild.core.events import Emit, Output, Transfer
from smolbuild.model.lock import LockedRun
from smolbuild.source.docker_engine import NO_ENGINE, EngineImage
from smolbuild.source.image_config import parse_config

if TYPE_CHECKING:
    import docker

__all__ = ["DockerClient"]

_ANSWER_SECONDS = 60.0
"""For one answer, and between two pieces of a longer one."""
_BUILD_SECONDS = 3600.0
_SAVE_SECONDS = 1800.0
_CHUNK = 1 << 20
_TAIL_LINES = 40


class DockerClient:
    """See ``DockerEngine``. ``environment`` is the process's; close it after use."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._connected: docker.DockerClient | None = None

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def image(self, name: str) -> EngineImage:
        """See ``DockerEngine.image``."""
        with self._errors(name):
            found = self._client().images.get(name).attrs
        return _engine_image(found, f"image {name} of the Docker engine")

    def save(self, image: Digest, into: IO[bytes], emit: Emit) -> None:
        """See ``DockerEngine.save``."""
        deadline = time.monotonic() + _SAVE_SECONDS
        done = 0
        with self._errors(image):
            client = self._client()
            total = int(client.images.get(image).attrs.get("Size") or 0)
            with contextlib.closing(client.api.get_image(image, chunk_size=_CHUNK)) as chunks:
                for chunk in chunks:
                    _in_time(deadline, "saving the image")
                    into.write(chunk)
                    done += len(chunk)
                    emit(Transfer(what="docker save", done=done, total=max(total, done)))

    def build(
        self,
        context: Iterable[bytes],
        *,
        dockerfile: str,
        target: str | None,
        args: Mapping[str, str],
        emit: Emit,
    ) -> EngineImage:
        """See ``DockerEngine.build``."""
        deadline = time.monotonic() + _BUILD_SECONDS
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        built = ""
        # A file, as the package itself makes one: what changed meanwhile shows before it is sent.
        import tempfile

        with tempfile.TemporaryFile() as archive, self._errors(dockerfile):
            for piece in context:
                archive.write(piece)
            archive.seek(0)
            answer = self._client().api.build(
                fileobj=archive,
                custom_context=True,
                dockerfile=dockerfile,
                target=target or "",
                buildargs=dict(args),
                rm=True,
                forcerm=True,
                decode=True,
                timeout=int(_BUILD_SECONDS),  # an instruction may be silent for long
            )
            with contextlib.closing(answer) as records:
                for record in records:
                    _in_time(deadline, f"building {dockerfile}")
                    text = _text_of(record)
                    if text:
                        tail.append(text)
                        emit(Output(source=dockerfile, stream="stdout", data=text.encode()))
                    if "error" in record:
                        raise _failed(dockerfile, record, tail)
                    built = (record.get("aux") or {}).get("ID") or built
        return self.image(built)

    def _client(self) -> "docker.DockerClient":
        if self._connected is None:
            import docker

            self._connected = docker.from_env(
                environment=dict(self._environment), timeout=int(_ANSWER_SECONDS), version="auto"
            )
        return self._connected

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn the package's errors into ours."""
        import docker
        import requests

        try:
            yield
        except docker.errors.ImageNotFound as error:
            raise UsageError(
                f"the Docker engine has no image {name}",
                hint=f"get it (`docker pull {name}`) or make it (`docker build -t {name} .`)",
                code="missing-image",
            ) from error
        except docker.errors.APIError as error:
            raise BuildError(
                f"the Docker engine refuses {name}: {error.explanation or error}", code="docker"
            ) from error
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> SmolbuildError:
        where = self._environment.get("DOCKER_HOST") or "the current context of `docker`"
        if "PermissionError" in repr(error) or "Permission denied" in str(error):
            return HostError(
                f"this user may not talk to the Docker engine ({where})",
                hint="run as a member of the group that owns its socket (`docker` on Debian)",
                code=NO_ENGINE,
            )
        return HostError(
            f"no Docker engine answers ({where}): {error}",
            hint="start it (`systemctl start docker`), or set DOCKER_HOST to where it listens",
            code=NO_ENGINE,
        )


def _engine_image(attributes: Mapping[str, Any], what: str) -> EngineImage:
    """Return what an engine's inspection of an image says, checked as an image's own words are."""
    data = {
        "architecture": attributes.get("Architecture"),
        "os": attributes.get("Os"),
        "config": attributes.get("Config") or {},
    }
    config, _ = parse_config(json.dumps(data).encode(), what)
    try:
        found = parse_digest(str(attributes.get("Id")))
    except ValueError as error:
        raise BuildError(f"{what}: the engine gives it no ID: {error}", code="docker") from error
    run = LockedRun(
        env=config.env,
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        workdir=config.workdir,
        user=config.user,
    )
    return EngineImage(id=found, run=run)


def _text_of(record: Mapping[str, Any]) -> str:
    text = record.get("stream")
    if text is None and record.get("status"):  # an image that FROM names is pulled
        text = " ".join(str(record.get(key) or "") for key in ("id", "status")).strip() + "\n"
    return str(text or "")


def _failed(dockerfile: str, record: Mapping[str, Any], tail: Iterable[str]) -> BuildError:
    return BuildError(
        f"building {dockerfile} failed: {str(record['error']).strip()}",
        hint="`docker build` shows the same; set [smolbuild.base] args or target if one is missing",
        code="dockerfile",
        details="".join(tail).strip(),
    )


def _in_time(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise BuildError(f"{what} took too long", code="docker-timeout")
