"""Attempts to have prompts prefilled elsewhere, and the pages that others may write into meanwhile.

A fetched page is the attempt's from `on_fetch` until `KVEnded`, when nothing can land in it any
more, however long that takes. Then it is the request's, if that still waits, or free. A request
that was cancelled or whose attempt failed leaves at once, without its pages: if it is tried again,
a copy of its sequence keeps them.

                      .------------------------------------- KVEnded -> gone: the sequence runs
    start (on_fetch) -+-- KVFailed -> parted: it owns pages -.
                      '-- cancel ---> parted: it owns pages -'- KVEnded -> gone: free

If the end may never come (`KVStuck`), requests that do not fit beside are not kept waiting.
"""

import itertools
import secrets
from dataclasses import replace

from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import Sequence
from disagg.hooks import DecodeHooks, FetchKV
from disagg.kv_layout import pages_for


class Attempts:
    """All attempts whose pages are not a running request's or free; the engine thread's alone.

    Every attempt ends once. Events before may name one that nobody waits for: they crossed a
    cancel, and ignoring them is harmless, for its pages wait for the end.
    """

    def __init__(self, scheduler: Scheduler, hooks: DecodeHooks | None) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        #: Whose pages they are. One that still waits has the number as its `attempt`.
        self._owners: dict[int, Sequence] = {}
        #: Which of them may never be released.
        self._stuck: set[int] = set()
        # From anywhere: those of several decoders meet at a prefiller.
        self._numbers = itertools.count(secrets.randbits(63))

    def start(self, sequence: Sequence) -> None:
        """Have positions 0..N-2 of a sequence that has its pages computed elsewhere."""
        assert sequence.tail_slot is not None, f"request {sequence.number} fetches without a slot"
        assert self._hooks is not None, f"request {sequence.number} fetches without a messenger"
        attempt = sequence.attempt = next(self._numbers)
        self._owners[attempt] = sequence
        # One less than those of the prompt where N = k * P + 1.
        num_pages = pages_for(sequence.num_prompt_tokens - 1, self._scheduler.cache.page_size)
        self._hooks.on_fetch(
            FetchKV(
                attempt=attempt,
                token_ids=tuple(sequence.tokens),
                page_indices=sequence.page_indices[:num_pages],
                tail_slot=sequence.tail_slot,
                retries=sequence.retries,
            )
        )

    def part(self, attempt: int) -> Sequence | None:
        """Who waits for an attempt, but no longer; it keeps the pages. None if nobody does."""
        sequence = self._owners[attempt]
        if sequence.attempt is None:
            return None
        sequence.attempt = None
        return sequence

    def try_again(self, attempt: int, parted: Sequence, *, remote: bool) -> None:
        """Queue it from zero and for fresh pages: the old ones may still be written to, and stay
        with the attempt."""
        self._owners[attempt] = replace(parted)
        parted.page_indices, parted.tail_slot = (), None
        parted.remote, parted.retries = remote, parted.retries + 1
        self._scheduler.add(parted)

    def cancel(self, attempt: int) -> None:
        """Its request is not wanted any more."""
        assert self._hooks is not None, f"attempt {attempt} has no messenger"
        self._hooks.on_cancel(attempt)
        self.part(attempt)

    def on_stuck(self, attempt: int) -> None:
        """Count on its pages and slot no more, until they are released all the same."""
        self._stuck.add(attempt)

    def hopeless(self) -> Sequence | None:
        """The head of a queue that moves no more, for all that is not free now is stuck."""
        waiting, all_stuck = self._scheduler.waiting, self._owners.keys() <= self._stuck
        if waiting and self._owners and all_stuck and not self._scheduler.running:
            return waiting[0]
        return None

    def end(self, attempt: int) -> Sequence | None:
        """Nothing can land any more: let the request decode, and return it if it still waits; else
        free what the attempt owns."""
        ready, owner = self.part(attempt), self._owners.pop(attempt)
        if ready is None:
            self._scheduler.release(owner)
        else:
            self._scheduler.ready(ready)
        return ready
