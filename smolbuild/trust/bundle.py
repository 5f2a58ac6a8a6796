"""Sigstore bundles, version 0.3, with one DSSE signature by a plain key.

The layout is cosign's (``cosign sign --key``, v3): the key is named by its hint, the signature has
no ``keyid`` (cosign compares a non-empty one with another kind of fingerprint), and there is no log
entry. Everything that is not understood is refused.
"""

import base64
import binascii
from dataclasses import dataclass
from typing import NoReturn

from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import BUNDLE_TYPE, encode_json, parse_json_object
from smolbuild.trust.dsse import PAYLOAD_TYPE, pae
from smolbuild.trust.keys import Signer
from smolbuild.trust.statement import Statement

__all__ = ["MAX_BUNDLE_BYTES", "Bundle", "encode_bundle", "parse_bundle", "sign_statement"]

MAX_BUNDLE_BYTES = 8 * 1024 * 1024
_MAX_SIGNATURE = 256
_MAX_HINT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A parsed bundle: nothing in it is verified yet."""

    payload: bytes
    payload_type: str
    signature: bytes
    """ASN.1 DER."""
    hint: str
    """Selects the key among those the verifier trusts; proves nothing."""

    @property
    def signed_bytes(self) -> bytes:
        """What the signature must cover."""
        return pae(self.payload, self.payload_type)


def sign_statement(statement: Statement, signer: Signer) -> bytes:
    """Return the bundle of ``statement`` signed by ``signer``.

    ECDSA is randomised: two calls give two different bundles, both valid.
    """
    payload = statement.encode()
    return encode_bundle(payload, signature=signer.sign(pae(payload)), hint=signer.public.hint)


def encode_bundle(payload: bytes, *, signature: bytes, hint: str) -> bytes:
    """Return the bytes of a bundle around an in-toto ``payload``."""
    return encode_json(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": hint}},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": base64.b64encode(signature).decode()}],
            },
        }
    )


def parse_bundle(data: bytes) -> Bundle:
    """Parse a bundle strictly.

    Raises:
        VerificationError: code ``malformed``; says which member.

    """
    value = parse_json_object(data, "bundle", limit=MAX_BUNDLE_BYTES)
    _exactly(value, {"mediaType", "verificationMaterial", "dsseEnvelope"}, "bundle")
    if value["mediaType"] != BUNDLE_TYPE:
        _bad(f"mediaType is {str(value['mediaType'])[:120]!r}")
    material = _exactly(value["verificationMaterial"], {"publicKey"}, "verificationMaterial")
    key = _exactly(material["publicKey"], {"hint"}, "publicKey")
    envelope = _exactly(
        value["dsseEnvelope"], {"payload", "payloadType", "signatures"}, "dsseEnvelope"
    )
    if envelope["payloadType"] != PAYLOAD_TYPE:
        _bad(f"payloadType is {str(envelope['payloadType'])[:120]!r}")
    signatures = envelope["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        _bad("it does not have exactly one signature")
    signature = _exactly(signatures[0], {"sig"}, "signature")
    hint = key["hint"]
    if not isinstance(hint, str) or not hint or len(hint) > _MAX_HINT:
        _bad("hint is not a short string")
    sig = _base64(signature["sig"], "sig")
    if len(sig) > _MAX_SIGNATURE:
        _bad("sig is too long")
    return Bundle(
        payload=_base64(envelope["payload"], "payload"),
        payload_type=PAYLOAD_TYPE,
        signature=sig,
        hint=hint,
    )


def _exactly(value: object, members: set[str], what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        _bad(f"{what} is not an object")
    missing, unknown = members - value.keys(), value.keys() - members
    if missing:
        _bad(f"{what} has no {min(missing)}")
    if unknown:
        _bad(f"{what} has an unknown member {min(unknown)[:80]!r}")
    return value


def _base64(value: object, what: str) -> bytes:
    if not isinstance(value, str) or not value:
        _bad(f"{what} is not a string")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise VerificationError(f"bundle: {what} is not base64", code="malformed") from error
    if base64.b64encode(data).decode() != value:
        _bad(f"{what} is not canonical base64")
    return data


def _bad(problem: str) -> NoReturn:
    raise VerificationError(f"bundle: {problem}", code="malformed")
