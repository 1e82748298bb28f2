"""The first frame each way: who speaks, which version, over which transports.

| magic, 8 bytes | version, u32 | msgpack [{transport: info, ...}, key] |
'---- the same in every version ----'       info: the link's own bytes
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from disagg.transfer.interface import TransferError

MAX_OPENING_BYTES = 64 << 10

_MAGIC = b"disagg\x00\x01"
_VERSION = 1
_PREFIX = _MAGIC + _VERSION.to_bytes(4, "little")

_Kind = TypeVar("_Kind")


class Opening(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """`offers`: by transport, opaque (addresses, tokens). With a `key`, the connection joins
    another one, and offers nothing.

    Who is called takes the first transport of its own list that fits, and offers that one alone.
    """

    offers: dict[str, bytes]
    key: bytes = b""


def encode_opening(opening: Opening) -> bytes:
    """The frame, without its length."""
    return _PREFIX + msgspec.msgpack.encode(opening)


def decode_opening(frame: bytes, transports: Sequence[str]) -> Opening:
    """A peer's opening with a key, or that offers one of `transports`. TransferError says what is
    wrong."""
    if not frame.startswith(_MAGIC):
        raise TransferError("no opening of a disagg node; check host and port")
    version = int.from_bytes(frame[len(_MAGIC) : len(_PREFIX)], "little")
    if version != _VERSION:
        raise TransferError(
            f"control version {version}, ours is {_VERSION}; run one release on both"
        )
    opening = decode(frame[len(_PREFIX) :], Opening, "a malformed opening")
    if not opening.key and not opening.offers.keys() & set(transports):
        theirs, ours = (", ".join(names)[:99] or "none" for names in (opening.offers, transports))
        raise TransferError(
            f"an opening for transport {theirs}, ours is {ours}; give both the same --transport"
        )
    return opening


def decode(data: bytes, kind: type[_Kind], what: str) -> _Kind:
    """A peer's msgpack. TransferError says `what` is wrong with it."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise TransferError(f"{what}: {error}") from error
