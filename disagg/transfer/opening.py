"""The first frame each way: who speaks, which version, over which transport.

| magic, 8 bytes | version, u32 | msgpack [epoch, transport, info] |
'---- the same in every version ----'       info: the transport's own bytes
"""

from __future__ import annotations

import struct

import msgspec

MAX_OPENING_BYTES = 64 << 10

_MAGIC = b"disagg\x00\x01"
_VERSION = 1
_PREFIX = struct.Struct("<8sI")


class Opening(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """`epoch`: random, 64 bits, of the engine. `info`: opaque (addresses, tokens)."""

    epoch: int
    transport: str
    info: bytes


def encode_opening(opening: Opening) -> bytes:
    """The frame, without its length."""
    return _PREFIX.pack(_MAGIC, _VERSION) + msgspec.msgpack.encode(opening)


def decode_opening(frame: bytes, transport: str) -> Opening:
    """A peer's opening that fits ours. ValueError says what is wrong with it."""
    if len(frame) < _PREFIX.size or not frame.startswith(_MAGIC):
        raise ValueError("no opening of a disagg node; check host and port")
    version = _PREFIX.unpack_from(frame)[1]
    if version != _VERSION:
        raise ValueError(f"control version {version}, ours is {_VERSION}; run one release on both")
    try:
        opening = msgspec.msgpack.decode(frame[_PREFIX.size :], type=Opening)
    except msgspec.DecodeError as error:
        raise ValueError(f"a malformed opening ({error})") from error
    if opening.transport != transport:
        raise ValueError(
            f"transport {opening.transport!r}, ours is {transport!r}; start both with the same one"
        )
    return opening
