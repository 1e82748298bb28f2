"""The memory a node computes in and others write into: KV pages, tail slots, the layer counter.

Each is a block that another process can map by file descriptor. Where things lie in it is
`kv_layout.py`; who owns which page is `page_allocator.py`; `serve/node.py` registers the blocks
with the transfer engine.

    memory       | layer 0 [num_pages, *page_shape] | layer 1 ... |   one torch view a layer
    tail_memory  | slot 0: words, hidden state | slot 1 ...  |        two words are the messenger's
    counter      | 64-bit word |                                      engine adds, messenger reads
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.config import ITEMSIZE, CacheConfig, ModelConfig
from disagg.kv_layout import KVLayout, heads_of_rank, tail_slot
from disagg.resource import Resource
from disagg.shared_memory import SharedMemory


class KVCache(Resource):
    """All KV pages and tail slots of one of `tp` ranks; zeroed, unless in memory that is `shared`.

    `layers[l]` is `[num_pages, *page_shape]` in `config.dtype`, a view of `memory`, where `layout`
    says which bytes are a page. `tails` is a view of `tail_memory`: `kv_layout.tail_slot`
    `[num_tail_slots]`. `tail_hidden` is one of the hidden state of every slot, `[num_tail_slots,
    hidden_size]` in `config.dtype`; `tail_forward_end_ns` of that word: uint64 `[num_tail_slots]`.
    Pickled, and unpickled in a child process that inherits both descriptors, it is the same memory.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: ModelConfig,
        tp: int = 1,
        shared: tuple[SharedMemory, SharedMemory] | None = None,
    ) -> None:
        self._made_of = config, model, tp
        self.model, self.dtype = model, config.dtype
        self.layout = KVLayout(
            order=config.kv_layout,
            num_layers=model.num_layers,
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_kv_heads=len(heads_of_rank(model.num_kv_heads, tp, 0)),
            head_dim=model.head_dim,
            itemsize=ITEMSIZE[config.dtype],
            num_vectors=model.num_kv_vectors,
        )
        slot = tail_slot(model.hidden_size * ITEMSIZE[config.dtype])
        self.memory, self.tail_memory = shared or (
            SharedMemory(self.layout.region_bytes, name="disagg-kv"),
            SharedMemory(config.num_tail_slots * slot.itemsize, name="disagg-tail"),
        )

        dtype = getattr(torch, config.dtype)
        pages = torch.frombuffer(self.memory.buffer, dtype=dtype)
        self.layers: list[Tensor] = list(
            pages.view(model.num_layers, config.num_pages, *self.layout.page_shape)
        )
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
