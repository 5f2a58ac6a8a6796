import pytest
from engine_contract import EngineContract


class TestQemu(EngineContract):
    @pytest.fixture
    def booted(self, engine, spec):
        machine = engine.boot(spec)
        yield machine
        machine.discard()

    @pytest.fixture
    def machine(self, fork):
        return fork
