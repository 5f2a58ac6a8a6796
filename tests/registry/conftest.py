"""Registries and clients for the transport's tests."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testing_registry import FakeClock, FakeRegistry, docker_registry

from smolbuild.registry.client import RegistryClient
from smolbuild.registry.credentials import Credential, Credentials
from smolbuild.registry.retry import RetryPolicy, Timeouts


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def make_client(clock: FakeClock) -> Iterator[Callable[..., RegistryClient]]:
    """Give a maker of clients with short deadlines, few retries and a clock that never waits."""
    made: list[RegistryClient] = []

    def make(registry: FakeRegistry | str, **options: object) -> RegistryClient:
        host = registry if isinstance(registry, str) else registry.host
        settings = {
            "clock": clock,
            "timeouts": Timeouts(connect=2, read=5),
            "retries": RetryPolicy(attempts=3),
            **options,
        }
        client = RegistryClient(host, **settings)  # type: ignore[arg-type]
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(fake: FakeRegistry, make_client: Callable[..., RegistryClient]) -> RegistryClient:
    return make_client(fake)


@pytest.fixture
def login(fake: FakeRegistry) -> Credentials:
    """Give the right login for ``fake``."""
    entry = Credential(username=fake.user, password=fake.password)
    return Credentials(auths={fake.host: entry})


@pytest.fixture(scope="session")
def real_registry() -> Iterator[str]:
    """Give the host of a real docker-registry on loopback; tests use repositories of their own."""
    # Not pytest's own directory, which keeps the last three runs' megabytes.
    with tempfile.TemporaryDirectory() as directory, docker_registry(Path(directory)) as host:
        yield host
