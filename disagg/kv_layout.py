"""Where a page, a layer, a head and a tail slot lie: bytes and offsets, no tensors.

A rank's KV is one block of memory: a region for the model. A layer is an offset in it, a page an
offset in a layer:

    region   | layer 0                          | layer 1 ...
             | page 0 | page 1 | ... | page n-1 | page 0 | ...
    HND page | head 0: K [page_size, head_dim], V [page_size, head_dim] | head 1: K, V | ...
    NHD page | K: token 0 [heads, head_dim], token 1, ...               | V: token 0, token 1, ...
    MLA page | token 0 [head_dim], token 1, ...

A draft model's region follows the model's in the same block, with a layout of its own. HND (the
default) keeps a head's K and V together, so a range of heads is one contiguous run of bytes. In NHD
a range of heads is one run for every token, for K and for V. With MLA (multi-head latent attention)
a token has one vector, K and V of all heads in one: both orders are the same.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

#: Offsets in bytes from the start of a region.
Offsets = npt.NDArray[np.int64]


class PageOrder(enum.StrEnum):
    """Order of the axes inside a page, in FlashInfer's letters."""

    HND = "HND"
    NHD = "NHD"


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Byte layout of one rank's KV region for one model.

    `num_kv_heads` counts the heads this rank holds; `itemsize` is bytes per element. A head has
    `num_vectors` vectors a token: K and V or, as the one head of MLA, a latent. `start` is where
    the region begins: that of a draft model comes after the model's, in the same memory.
    """

    order: PageOrder
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    num_vectors: int = 2
    start: int = 0

    @property
    def page_shape(self) -> tuple[int, ...]:
        """One page: `[heads, 2, page_size, head_dim]`, `[2, page_size, heads, head_dim]` or, MLA,
        `[page_size, head_dim]`."""
        if self.num_vectors == 1:
            return (self.page_size, self.head_dim)
        if self.order == PageOrder.HND:
            return (self.num_kv_heads, 2, self.page_size, self.head_dim)
        return (2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return math.prod(self.page_shape) * self.itemsize

    @property
    def region_bytes(self) -> int:
        """Bytes of the whole region."""
        return self.num_layers * self.num_pages * self.page_bytes

    def page_offsets(self, layer: int, page_indices: npt.NDArray[np.int64]) -> Offsets:
        """Byte offset in the memory of each page of `page_indices` in `layer`."""
        return self.start + (layer * self.num_pages + page_indices) * self.page_bytes


def stacked(layouts: Iterable[KVLayout]) -> list[KVLayout]:
    """Of regions that lie one behind the other in one memory."""
    placed: list[KVLayout] = []
    for layout in layouts:
        placed.append(replace(layout, start=sum(before.region_bytes for before in placed)))
    return placed


def tail_slot(hidden_bytes: int) -> np.dtype[np.void]:
    """A tail slot: what goes with a prompt beside its KV, one of fixed size a request.

    slot | attempt_id, first_post_ns, forward_end_ns: u64 | hidden state at position N-2 | pad

    The times are on the prefiller's monotonic clock: when the attempt's first write was handed to
    its transfer engine, and when the forward pass of its last chunk ended. The engine takes the
    latter between the copy of the hidden state and the step's last counter increment, so no poll
    makes it late.
    """
    words = [(name, "<u8") for name in ("attempt_id", "first_post_ns", "forward_end_ns")]
    up_to_a_cache_line = f"V{-(24 + hidden_bytes) % 64}"
    return np.dtype([*words, ("hidden", "u1", hidden_bytes), ("pad", up_to_a_cache_line)])


def heads_of_rank(num_kv_heads: int, tp: int, rank: int) -> range:
    """The KV heads that one of `tp` ranks holds: an equal share or, if there are more ranks than
    heads, the one head that it holds like its `tp / num_kv_heads - 1` neighbours.

    ValueError if neither number divides the other.
    """
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} KV heads cannot be shared by {tp} ranks; expected a divisor or a"
            f" multiple of {num_kv_heads}; choose another tp"
        )
    first = rank * num_kv_heads // tp
    return range(first, first + max(1, num_kv_heads // tp))


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
