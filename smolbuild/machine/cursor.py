"""Where a saved machine's session with its agent stands, so that a restored one goes on with it."""

import json
from dataclasses import dataclass
from typing import Any, Self

from smolbuild.core.errors import MachineError

__all__ = ["Cursor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What ``Checkpoint.agent_cursor`` holds: the agent session, and how the guest counts time."""

    session: bytes
    tsc_khz: int

    def encode(self) -> bytes:
        """Return the cursor as bytes; ``decode`` of them gives an equal value."""
        return json.dumps({"session": self.session.hex(), "tscKhz": self.tsc_khz}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse and check a cursor.

        Raises:
            MachineError: it is none.

        """
        try:
            value: dict[str, Any] = json.loads(data)
            session, khz = bytes.fromhex(value["session"]), value["tscKhz"]
        except (ValueError, KeyError, TypeError) as error:
            raise MachineError(
                "the checkpoint's agent session is damaged or of another version of smolbuild",
                hint="build the artifact again with this version",
                code="damaged",
            ) from error
        if not isinstance(khz, int) or khz < 0:
            raise MachineError("the checkpoint's clock frequency is damaged", code="damaged")
        return cls(session=session, tsc_khz=khz)
