"""Tensor parallelism: each rank holds a share of every matrix, and sums and joins make one model.

    column-parallel   rank r has some of a map's outputs     qkv, gate and up: row-parallel next
    row-parallel      rank r has some of a map's inputs      o_proj, down: parts of a sum
    vocabulary        rank r has some of the tokens          embedding: summed, logits: joined

    x --> [gate up]_0 --> [down]_0 --> part 0 --.
    x --> [gate up]_1 --> [down]_1 --> part 1 --+--> sum, the same on all ranks

With gloo (torch.distributed on CPUs) a sum takes about a millisecond even for the few numbers of a
decode step, most of it for waking threads. The ranks are on one host, so what fits goes through
memory that all of them map instead. Each sum or join is a turn:

    block    even turns | part 0 | part 1 | ...    odd turns | part 0 | part 1 | ...
    flags    how many parts each rank has ever put there; it reads when all have put as many

A rank that puts its part of a turn has seen all parts of the turn before. So nobody is more than
one turn ahead of a rank that still reads, and what it writes lies in the other half.
"""

import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from disagg.config import ModelConfig
from disagg.kv_layout import heads_of_rank
from disagg.shared_memory import SharedMemory

#: The largest part that goes through shared memory.
MAX_PART_BYTES = 1 << 22
#: CPU seconds that a rank spins for the part of another, which counts as hanging then. Time that
#: passes while all of them are stopped does not count.
SECONDS = 60.0


def block_bytes(tp: int) -> int:
    """Bytes of the shared block of `tp` ranks."""
    return 2 * tp * MAX_PART_BYTES + 8 * tp


def check_shares(model: ModelConfig, tp: int) -> None:
    """ValueError, one line, if `tp` ranks cannot share this model."""
    sizes = {n: getattr(model, n) for n in ("num_qo_heads", "intermediate_size", "num_experts")}
    shared = model.n_shared_experts * model.moe_intermediate_size
    sizes["n_shared_experts * moe_intermediate_size"] = shared
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"{name} {size} of the model cannot be shared by {tp} ranks; choose a --tp that"
                " divides it"
            )
    heads_of_rank(model.num_kv_heads, tp, 0)


class RankGroup:
    """The ranks of a model as one of them sees them; without arguments, the only one.

    All ranks make the same calls in the same order. `block` is zeroed memory of `block_bytes(tp)`
    that all of them map. A part that is too large for it goes through the default process group of
    torch.distributed, which `meet` makes. A sum or join raises TimeoutError if another rank hangs.
    """

    def __init__(self, rank: int = 0, tp: int = 1, block: SharedMemory | None = None) -> None:
        self.rank = rank
        self.tp = tp
        self._turn = 0
        if block is not None:
            parts = torch.frombuffer(block.buffer, dtype=torch.uint8)
            self._parts = parts[: -8 * tp].view(2, tp, MAX_PART_BYTES)
            self._flags = block.bytes[-8 * tp :].view(np.uint64)

    def meet(self, meeting: int) -> None:
        """Wait for the others. They find each other in the file behind the descriptor `meeting`,
        one for all of them and empty at first."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        place = f"file:///proc/self/fd/{meeting}"
        dist.init_process_group("gloo", init_method=place, rank=self.rank, world_size=self.tp)

    def cut(self, tensor: Tensor, axis: int, unit: int = 1) -> Tensor:
        """This rank's share, a view, of an axis that consists of heads of `unit` elements each. If
        there are more ranks than heads, some get the same. ValueError if it cannot be shared."""
        heads = heads_of_rank(tensor.shape[axis] // unit, self.tp, self.rank)
        return tensor.narrow(axis, heads.start * unit, len(heads) * unit)

    def cut_vocabulary(self, tensor: Tensor) -> Tensor:
        """This rank's rows of `[vocab_size, hidden_size]`; the last ranks' are filled up with zeros
        so that all have the same number."""
        missing = -len(tensor) % self.tp
        return self.cut(F.pad(tensor, (0, 0, 0, missing)) if missing else tensor, 0)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, which have one shape; the same bits on all ranks."""
        return part if self.tp == 1 else self._gather(part).sum(0)

    def join(self, part: Tensor) -> Tensor:
        """All ranks' parts, which have one shape, side by side in the last axis."""
        return part if self.tp == 1 else torch.cat(list(self._gather(part)), -1)

    def _gather(self, part: Tensor) -> Tensor:
        """All ranks' parts, `[tp, *part.shape]`; valid until this rank puts its next part."""
        if part.nbytes > MAX_PART_BYTES:
            parts = part.new_empty(self.tp, *part.shape)
            dist.all_gather(list(parts), part.contiguous())
            return parts
        half = self._parts[self._turn % 2, :, : part.nbytes].view(part.dtype)
        parts = half.view(self.tp, *part.shape)
        parts[self.rank].copy_(part)
        self._turn += 1
        # Stores are seen in their order (x86): a part before its flag.
        self._flags[self.rank] = self._turn
        end = time.thread_time() + SECONDS
        while int(self._flags.min()) < self._turn:
            os.sched_yield()
            if time.thread_time() > end:
                raise TimeoutError(f"a rank is late by {SECONDS:g} s: turns {self._flags}")
        return parts
