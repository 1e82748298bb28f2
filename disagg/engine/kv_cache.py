"""The memory a node computes in and others write into: KV pages, tail slots, the layer counter.

Each is a block that another process can map by file descriptor. Where things lie in it is
`kv_layout.py`; who owns which page is `page_allocator.py`; `serve/node.py` registers the blocks
with the transfer engine.

    memory       | layer 0 [num_pages, *page_shape] | layer 1 ... |   one torch view a layer
    tail_memory  | slot 0: words, hidden state | slot 1 ...  |        two words are the messenger's
    counter      | 64-bit word |                                      engine adds, messenger reads
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.config import ITEMSIZE, CacheConfig, ModelConfig
from disagg.kv_layout import KVLayout, heads_of_rank, stacked, tail_slot
from disagg.resource import Resource
from disagg.shared_memory import SharedMemory


class KVCache(Resource):
    """All KV pages and tail slots of one of `tp` ranks; zeroed, unless in memory that is `shared`.

    `layers[l]` is `[num_pages, *page_shape]` in `config.dtype`, a view of `memory`: those of the
    model, then those of the draft model, if there is one. `layouts`, one for each of these, say
    which bytes are a page. `tails` is a view of `tail_memory`: `kv_layout.tail_slot`
    `[num_tail_slots]`. `tail_hidden` is one of the hidden state of every slot, `[num_tail_slots,
    hidden_size]` in `config.dtype`; `tail_forward_end_ns` of that word: uint64 `[num_tail_slots]`.
    Pickled, and unpickled in a child process that inherits both descriptors, it is the same memory.
    """

    def __init__(
        self,
        config: CacheConfig,
        models: Sequence[ModelConfig],
        tp: int = 1,
        shared: tuple[SharedMemory, SharedMemory] | None = None,
    ) -> None:
        self._made_of = config, models, tp
        self.models, self.dtype = models, config.dtype
        self.layouts = stacked(
            KVLayout(
                order=config.kv_layout,
                num_layers=each.num_layers + each.num_draft_layers,
                num_pages=config.num_pages,
                page_size=config.page_size,
                num_kv_heads=len(heads_of_rank(each.num_kv_heads, tp, 0)),
                head_dim=each.head_dim,
                itemsize=ITEMSIZE[config.dtype],
                num_vectors=each.num_kv_vectors,
            )
            for each in models
        )
        slot = tail_slot(models[0].hidden_size * ITEMSIZE[config.dtype])
        self.memory, self.tail_memory = shared or (
            SharedMemory(sum(each.region_bytes for each in self.layouts), name="disagg-kv"),
            SharedMemory(config.num_tail_slots * slot.itemsize, name="disagg-tail"),
        )

        dtype = getattr(torch, config.dtype)
        pages = torch.frombuffer(self.memory.buffer, dtype=dtype)
        self.layers: list[Tensor] = []
        for layout in self.layouts:
            shape = layout.num_layers, config.num_pages, *layout.page_shape
            first = layout.start // layout.itemsize
            self.layers += pages[first : first + math.prod(shape)].view(shape)
        self.tails = self.tail_memory.bytes.view(slot)
        self.tail_hidden = torch.from_numpy(self.tails["hidden"]).view(dtype)
        self.tail_forward_end_ns = self.tails["forward_end_ns"]

    def __reduce__(self) -> tuple[object, ...]:
        return KVCache, (*self._made_of, (self.memory, self.tail_memory))

    def close(self) -> None:
        """Close both descriptors; views stay valid while they are held. May be called twice."""
        self.memory.close()
        self.tail_memory.close()


class LayerCounter(SharedMemory):
    """Layers and step ends this node has ever finished: one 64-bit word that only grows.

    One thread adds (with several ranks, in the process of rank 0); anybody reads, also another
    process that maps it. A reader that sees a value sees the KV bytes stored before it: both sides
    are plain aligned stores and loads, which x86 keeps in order.
    """

    def __init__(self) -> None:
        super().__init__(8, name="disagg-counter")

    @cached_property
    def _word(self) -> npt.NDArray[np.uint64]:
        return self.bytes.view(np.uint64)

    def add(self) -> None:
        """Count one more layer, or the end of a step."""
        self._word[0] += np.uint64(1)

    def read(self) -> int:
        """The value now."""
        return int(self._word[0])
