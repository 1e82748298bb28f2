"""The first frame each way: who speaks, which version, over which transports.

| magic, 8 bytes | version, u32 | msgpack [epoch, {transport: info, ...}] |   or msgpack of a key
'---- the same in every version ----'       info: the link's own bytes
"""

import struct
from collections.abc import Sequence

import msgspec

MAX_OPENING_BYTES = 64 << 10

_MAGIC = b"disagg\x00\x01"
_VERSION = 1
_PREFIX = struct.Struct("<8sI")


class Opening(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """`epoch`: random, 64 bits, of the engine. `offers`: by transport, opaque (addresses, tokens).

    Who is called takes the first transport of its own list that fits, and offers that one alone.
    """

    epoch: int
    offers: dict[str, bytes]


def encode_opening(opening: Opening | bytes) -> bytes:
    """The frame, without its length."""
    return _PREFIX.pack(_MAGIC, _VERSION) + msgspec.msgpack.encode(opening)


def decode_opening(frame: bytes, transports: Sequence[str]) -> Opening | bytes:
    """A peer's opening that offers one of `transports`, or a key. ValueError says what is wrong."""
    if len(frame) < _PREFIX.size or not frame.startswith(_MAGIC):
        raise ValueError("no opening of a disagg node; check host and port")
    version = _PREFIX.unpack_from(frame)[1]
    if version != _VERSION:
        raise ValueError(f"control version {version}, ours is {_VERSION}; run one release on both")
    try:
        opening = msgspec.msgpack.decode(frame[_PREFIX.size :], type=Opening | bytes)
    except msgspec.DecodeError as error:
        raise ValueError(f"a malformed opening ({error})") from error
    if isinstance(opening, Opening) and not opening.offers.keys() & set(transports):
        theirs, ours = (", ".join(names)[:99] or "none" for names in (opening.offers, transports))
        raise ValueError(
            f"an opening for transport {theirs}, ours is {ours}; give both the same --transport"
        )
    return opening
