"""The last line of defence: one document, no traceback, whatever happens."""

import json
import signal

import pytest

from smolbuild.cli import main as module


@pytest.fixture(autouse=True)
def kept_handlers():
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def run(monkeypatch, error: BaseException, *arguments: str) -> int:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(module._root, "main", fail)
    return module.run(["ls", *arguments])


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (KeyError("nobody foresaw this"), "defect", 1),
        (RecursionError("deep"), "defect", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (module._Terminated(), "terminated", 143),
        (OSError(28, "No space left on device"), "no-space", 1),
        (OSError(13, "Permission denied"), "os-error", 1),
    ],
)
def test_every_end_is_one_document_and_no_traceback(monkeypatch, capsys, error, code, status):
    monkeypatch.delenv("SMOLBUILD_DEBUG", raising=False)
    assert run(monkeypatch, error, "--json") == status
    out, err = capsys.readouterr()
    document = json.loads(out)["error"]
    assert (document["code"], document["exitStatus"]) == (code, status)
    assert "Traceback" not in err
    assert run(monkeypatch, error) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err


def test_a_defect_says_where_and_how_to_see_more(monkeypatch, capsys):
    monkeypatch.delenv("SMOLBUILD_DEBUG", raising=False)
    run(monkeypatch, KeyError("nobody foresaw this"))
    err = capsys.readouterr().err
    assert "KeyError at test_main.py:" in err
    assert "SMOLBUILD_DEBUG=1" in err
    monkeypatch.setenv("SMOLBUILD_DEBUG", "1")

    def fail(**_: object) -> None:
        raise KeyError

    monkeypatch.setattr(module._root, "main", fail)
    with pytest.raises(KeyError):
        module.run(["ls"])
