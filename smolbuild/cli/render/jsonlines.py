"""``--progress json``: one JSON object per line, described in ``schemas/events.v1.json``."""

import codecs
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import TextIO

from smolbuild.core.events import Event, Output

__all__ = ["JsonLines"]


class JsonLines:
    """An ``Emit`` that writes each event as a line of JSON.

    A character whose bytes come in two pieces of output stands whole in the later one; bytes that
    are no UTF-8 are escaped with a backslash.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._now = now
        self._lock = threading.Lock()
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}

    def __call__(self, event: Event) -> None:
        """Write ``event``."""
        with self._lock:
            value: dict[str, object] = {
                "event": type(event).__name__,
                "time": round(self._now(), 3),
                **dataclasses.asdict(event),
            }
            if isinstance(event, Output):
                value["data"] = self._text(event)
            print(json.dumps(value), file=self._stream, flush=True)

    def close(self) -> None:
        """Write what is left of characters that never became whole."""
        with self._lock:
            for (source, name), decoder in self._decoders.items():
                if rest := decoder.decode(b"", final=True):
                    value = {
                        "event": Output.__name__,
                        "time": round(self._now(), 3),
                        "source": source,
                        "stream": name,
                        "data": rest,
                    }
                    print(json.dumps(value), file=self._stream, flush=True)
            self._decoders.clear()

    def _text(self, event: Output) -> str:
        key = event.source, event.stream
        if key not in self._decoders:
            self._decoders[key] = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        return self._decoders[key].decode(event.data)
