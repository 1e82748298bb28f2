"""The registered memory of one node, as the messenger is handed it: regions, layouts, tail slots.

kv_regions   | layer 0: pages | layer 1: pages | ...      (kv_layout.KVLayout), one for each rank
tail_region  | slot 0: words, hidden state | ...          (kv_layout.TailLayout)
scratch      | the pattern that a probe may ask for |
"""

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.kv_layout import KVLayout, TailLayout
from disagg.messenger.messages import Hello, Identity, Role
from disagg.messenger.sharding import Page
from disagg.transfer.interface import MemoryRegion

#: Bytes of a node's scratch region.
PROBE_BYTES = 1 << 22


class NodeMemory(msgspec.Struct, frozen=True, kw_only=True):
    """`layout` is that of each rank, `page` one of the whole model, whose heads `tp` ranks share.

    `tail_bytes` is a view of the whole tail region: uint8 `[tail.region_bytes]`.
    """

    layout: KVLayout
    page: Page
    tp: int
    kv_regions: tuple[MemoryRegion, ...]
    tail: TailLayout
    tail_region: MemoryRegion
    tail_bytes: npt.NDArray[np.uint8]
    scratch_region: MemoryRegion

    def tail_words(self, slot: int) -> npt.NDArray[np.uint64]:
        """The words at the start of a tail slot, to read and to write: uint64 `[3]`."""
        start = self.tail.slot_offset(slot)
        return self.tail_bytes[start : start + TailLayout.HEADER_BYTES].view("<u8")

    def hello(self, *, epoch: int, role: Role, identity: Identity) -> Hello:
        """What this node says of itself to a peer."""
        return Hello(
            epoch=epoch,
            role=role,
            identity=identity,
            num_pages=self.layout.num_pages,
            num_tail_slots=self.tail.num_slots,
            tp=self.tp,
            kv_regions=tuple(region.descriptor for region in self.kv_regions),
            tail_region=self.tail_region.descriptor,
        )


def probe_pattern() -> npt.NDArray[np.uint8]:
    """What the scratch region holds: words of four bytes, each its own index."""
    return np.arange(PROBE_BYTES // 4, dtype="<u4").view(np.uint8)
