"""The words of the hand-over protocol: typed structs in msgpack behind a version byte; no pickle.

    decoder                                        prefiller
      Hello ------------------------------------------->  compare
      <---------------------- Hello, or Goodbye(why)
      PrefillRequest(id, pages, imm, count) ----------->  queue, compute
      <============ one-sided writes, each with imm =====
      Cancel(id), if nobody waits any more ------------>  stop posting
      <-- nothing more; or PrefillStopped(why, posted)
      Heartbeat <-------------------------------------->  Heartbeat

`posted` is how many writes of the attempt were ever handed to the medium, each of which the decoder
will count. What each side does with a message is in `prefiller.py` and `decoder.py`.
"""

import enum
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

#: First byte of every message. Raise it with any change of a struct below.
PROTOCOL_VERSION = 7


#: Bounded on arrival, so that no peer can make an offset overflow.
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
PositiveU32 = Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
#: Most pages a probe gets at once, and bytes of the pattern that it gets.
MAX_PROBE_PAGES, PROBE_BYTES = 65536, 1 << 22
#: Ranks that share the KV heads. No peer can make us plan for a million.
TP = Annotated[int, msgspec.Meta(ge=1, le=256)]


class ProtocolError(Exception):
    """The peer said what this side cannot read or what breaks a rule; the text says which."""


class Role(enum.StrEnum):
    """What the sender of a Hello is. A probe holds no model, only a region to be written into."""

    PREFILLER = "prefiller"
    DECODER = "decoder"
    PROBE = "probe"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """All that must agree before bytes may move: every field is compared, and refused by its name.

    A new setting that would make bytes wrong becomes a field here; nothing else is needed.
    `model_fingerprint` covers config, tensor names, shapes, dtypes and samples of the weights.
    """

    model_fingerprint: str
    dtype: str
    kv_layout: str
    page_size: int
    num_layers: int
    num_draft_layers: int
    draft_model_fingerprint: str
    num_kv_heads: int
    num_kv_vectors: int
    head_dim: int
    hidden_size: int


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message in each direction: who I am and where I may be written to.

    `epoch` is random per process. `kv_regions` (one for each rank) and `tail_region` are transfer
    descriptors; a probe has a tail region alone, its scratch. `tp` ranks share the KV heads; if
    there are more regions than that, each `tp` of them in turn are a data-parallel group.
    """

    epoch: U64
    role: Role
    identity: Identity | None = None
    num_pages: U32 = 0
    num_tail_slots: U32 = 0
    tp: TP = 1
    kv_regions: tuple[int, ...] = ()
    tail_region: int


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute positions 0..N-2 of `token_ids` (N >= 2) and write them into the decoder's pages.

    `page_indices` are the decoder's `ceil((N-1) / page_size)` pages. Every write carries `imm`; the
    decoder waits for `expected_count` of them. `dp_rank` says which data-parallel group of ranks
    has the pages.
    """

    attempt_id: U64
    token_ids: Annotated[tuple[U32, ...], msgspec.Meta(min_length=2)]
    page_indices: tuple[U32, ...]
    tail_slot: U32
    imm: PositiveU32
    expected_count: PositiveU32
    dp_rank: U32


class PrefillStopped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The count will not be reached. Sent once, after posting has stopped or instead of a start.

    `permanent`: the request can never be served here.
    """

    attempt_id: U64
    why: str
    posted: U32 = 0
    permanent: bool = False


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop posting for this attempt. No answer is due if the attempt has ended at the prefiller:
    then it has sent a PrefillStopped before, or all writes, which the decoder counts to the end."""

    attempt_id: U64


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """I live. Any message says so; this one is sent when there is nothing else to say.

    `clock_ns` is the sender's monotonic clock as it sends; a prefiller's tails name times on it.
    """

    clock_ns: U64


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """I am leaving in good order, or this pair cannot work."""

    why: str


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a probe: write `num_pages` times `page_bytes` into my tail region, each with `imm`. A
    `PrefillStopped` answers what would leave this or the prefiller's scratch, or is too much."""

    page_bytes: PositiveU32
    num_pages: PositiveU32
    imm: PositiveU32


Message = Hello | PrefillRequest | PrefillStopped | Cancel | Heartbeat | Goodbye | ProbeRequest


def probe_pattern() -> npt.NDArray[np.uint8]:
    """What a prefiller writes to a probe: words of four bytes, each its own index."""
    return np.arange(PROBE_BYTES // 4, dtype="<u4").view(np.uint8)


def encode(message: Message) -> bytes:
    """A message as bytes: the version, then msgpack."""
    return bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """The message in `data`. ProtocolError if it is of another version or malformed."""
    if data[:1] != bytes((PROTOCOL_VERSION,)):
        versions = f"ours {PROTOCOL_VERSION}, theirs {data[0] if data else 'none'}"
        raise ProtocolError(f"protocol_version: {versions}; run one release on both nodes")
    try:
        return msgspec.msgpack.decode(data[1:], type=Message)
    # ValueError: some releases of msgspec let a str that is not UTF-8 through as it is.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed message of {len(data)} bytes: {error}") from error
