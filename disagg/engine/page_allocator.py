"""Who has which page: indices of a fixed pool, handed out and taken back by the engine thread.

Tail slots are handed out by a second allocator of the same kind. What lies in a page is
`kv_cache.py`; when a page may be given back is decided in `scheduler.py` and `attempts.py`.

      allocate(n)
    free ------> owned       by a sequence, or by a failed attempt whose writes may still land
    free <------ owned       (a prefix cache adds a third place, `cached`, beside these two)
          free(indices)
"""

from collections.abc import Iterable


class PageAllocator:
    """Indices `0..capacity-1`, each either free or owned. `kind` names them in errors."""

    def __init__(self, capacity: int, *, kind: str = "page") -> None:
        self.capacity = capacity
        self.kind = kind
        # In order: the index freed last is handed out first, its memory is likeliest to be in a CPU
        # cache. All others are owned.
        self._free = dict.fromkeys(range(capacity - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Indices that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Hand out `count` indices; None means "not now": nothing was taken, ask again later."""
        if count > len(self._free):
            return None
        return tuple(self._free.popitem()[0] for _ in range(count))

    def free(self, indices: Iterable[int]) -> None:
        """Take indices back. AssertionError for one that is not owned (a double free)."""
        for index in indices:
            is_owned = 0 <= index < self.capacity and index not in self._free
            assert is_owned, f"{self.kind} {index} is freed, but nobody owns it"
            self._free[index] = None
