"""Dead Simple Signing Envelope, version 1: what exactly is signed (secure-systems-lab/dsse)."""

__all__ = ["PAYLOAD_TYPE", "pae"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def pae(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return the pre-authentication encoding of ``payload``: the bytes that a signature covers."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
