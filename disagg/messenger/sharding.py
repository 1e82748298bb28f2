"""Which bytes of a page go from which rank to which rank: pure integers, no I/O.

    source rank 0   | page ............ |   one page of one layer
                       slice: offset, nbytes
    destination 0   | page ............ |   every byte written exactly once

Both sides use this file: the prefiller for what it writes, the decoder for what it counts. A write
carries one slice of one page of one layer, so the count is layers x pages x slices, plus the tail.
One rank on each side for now: a page is one slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.kv_layout import KVLayout


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A contiguous run of bytes that source and destination page share. Offsets lie in the page."""

    destination_rank: int
    source_offset: int
    destination_offset: int
    nbytes: int


def plan_slices(source: Sequence[KVLayout], destination: Sequence[KVLayout]) -> tuple[Slice, ...]:
    """The slices of one page, given the layout of every rank on both sides.

    ValueError names the pair if it cannot be planned: both sides must have one rank for now, and
    pages of one size.
    """
    if len(source) != 1 or len(destination) != 1:
        raise ValueError(
            f"cannot plan {len(source)} prefill ranks to {len(destination)} decode ranks:"
            " expected one rank on each side; start both nodes with one"
        )
    if source[0].page_bytes != destination[0].page_bytes:
        raise ValueError(
            f"pages differ: expected {destination[0].page_bytes} bytes as on the decoder,"
            f" got {source[0].page_bytes}; use one page size, layout and dtype on both nodes"
        )
    nbytes = source[0].page_bytes
    return (Slice(destination_rank=0, source_offset=0, destination_offset=0, nbytes=nbytes),)


def expected_count(slices: Sequence[Slice], num_layers: int, num_sent_pages: int) -> int:
    """Immediates of an attempt: every slice of every sent page of every layer, and the tail."""
    return num_layers * num_sent_pages * len(slices) + 1
