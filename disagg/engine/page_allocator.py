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
        # The index freed last is handed out first: its memory is likeliest to be in a CPU cache.
        self._free = list(range(capacity - 1, -1, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Indices that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Hand out `count` indices; None means "not now": nothing was taken, ask again later."""
        if count > len(self._free):
            return None
        indices = tuple(self._free.pop() for _ in range(count))
        self._owned.update(indices)
        return indices

    def free(self, indices: Iterable[int]) -> None:
        """Take indices back. AssertionError for one that is not owned (a double free)."""
        for index in indices:
            assert index in self._owned, f"{self.kind} {index} is freed, but nobody owns it"
            self._owned.remove(index)
            self._free.append(index)

    def check(self) -> None:
        """AssertionError unless each index is in exactly one place."""
        places = sorted([*self._free, *self._owned])
        assert places == list(range(self.capacity)), (
            f"each {self.kind} of 0..{self.capacity - 1} must be in exactly one of free and owned;"
            f" free {sorted(self._free)}, owned {sorted(self._owned)}"
        )
