"""``build --watch`` with real edits, and a real guest for one of them."""

import queue
import signal
import threading

import pytest

SECONDS = 120


class Watching:
    """The command, and its lines as they come; both streams are one."""

    def __init__(self, process) -> None:
        self.process = process
        self.lines: queue.Queue[str] = queue.Queue()
        self.threads = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, stream) -> None:
        for line in stream:
            self.lines.put(line.rstrip("\n"))

    def until(self, *texts: str) -> list[str]:
        """Return the lines up to where each text has come; one stream may overtake the other."""
        seen: list[str] = []
        while not all(any(text in line for line in seen) for text in texts):
            seen.append(self.lines.get(timeout=SECONDS))
        return seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join(10)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.mark.vm
def test_a_change_builds_again_an_error_does_not_end_it_and_ctrl_c_does(
    smolbuild, own_project, built
):
    smolfile = own_project / "Smolfile"
    whole = smolfile.read_text()
    watching = Watching(smolbuild.start("build", "--watch", "-t", "tiny:w", "-C", str(own_project)))
    try:
        watching.until("watching", "tiny:w: reused", built["key"])
        smolfile.write_text(whole + "\nnonsense = 1\n")
        watching.until("changed: Smolfile")
        watching.until("watching", "error: ", "nonsense")
        (own_project / "www" / "new.html").write_text("new")
        watching.until("changed: www/new.html")
        watching.until("watching")
        smolfile.write_text(whole)
        watching.until("changed: Smolfile")
        watching.until("tiny:w: built, proven and signed", "watching")
        watching.process.send_signal(signal.SIGINT)
        assert watching.process.wait(30) == 130
        watching.until("smolbuild: interrupted")
    finally:
        watching.close()


def test_watching_has_no_one_document(smolbuild, own_project):
    done = smolbuild("build", "--watch", "--json", "-C", str(own_project))
    assert done.status == 2
    assert "--watch" in done.document("error")["error"]["message"]
