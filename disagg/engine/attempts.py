"""Attempts to have prompts prefilled elsewhere, and the pages that others may write into meanwhile.

A fetched page is the attempt's from `on_fetch` on. `KVReady` makes it the request's; otherwise it
is free only at `KVReleased`, when nothing can land in it any more, however long that takes. A
request that was cancelled or whose attempt failed leaves at once, without its pages: they stay with
the sequence that fetched, and a request that is tried again goes on as another.

                      .-- KVReady ----> gone: the sequence runs
    start (on_fetch) -+-- KVFailed ---> parted: it only owns pages -.
                      '-- cancel -----> parted: it only owns pages -'- KVReleased -> gone: free

If the release may never come (`KVStuck`), requests that do not fit beside are not kept waiting.
"""

import itertools
from dataclasses import replace

from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import Sequence
from disagg.hooks import DecodeHooks, FetchKV


class Attempts:
    """All attempts whose pages are not a running request's or free; the engine thread's alone.

    Events may name attempts that are not known here, or that nobody waits for: answers that
    crossed a cancel. Ignoring them is harmless. Numbers never come back, so they cannot mean
    another attempt, and what may still land does so in pages that wait for `KVReleased`.
    """

    def __init__(self, scheduler: Scheduler, hooks: DecodeHooks | None) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        #: Whose pages they are. One that still waits has the number as its `attempt`.
        self._owners: dict[int, Sequence] = {}
        #: Which of them may never be released.
        self._stuck: set[int] = set()
        self._numbers = itertools.count(1)

    def start(self, sequence: Sequence) -> None:
        """Have positions 0..N-2 of a sequence that has its pages computed elsewhere."""
        assert sequence.tail_slot is not None, f"request {sequence.number} fetches without a slot"
        assert self._hooks is not None, f"request {sequence.number} fetches without a messenger"
        attempt = sequence.attempt = next(self._numbers)
        self._owners[attempt] = sequence
        self._hooks.on_fetch(
            FetchKV(
                attempt=attempt,
                token_ids=tuple(sequence.tokens),
                page_indices=self._scheduler.pages_to_fetch(sequence),
                tail_slot=sequence.tail_slot,
                retries=sequence.retries,
            )
        )

    def on_ready(self, attempt: int) -> Sequence | None:
        """Everything has landed: let the request decode, and return it if it still waits."""
        sequence = self.part(attempt)
        if sequence is not None:
            del self._owners[attempt]
            self._scheduler.ready(sequence)
        return sequence

    def part(self, attempt: int) -> Sequence | None:
        """Who waits for an attempt, but no longer; it keeps the pages. None if nobody does."""
        sequence = self._owners.get(attempt)
        if sequence is None or sequence.attempt is None:
            return None
        sequence.attempt = None
        return sequence

    def try_again(self, parted: Sequence, *, remote: bool) -> Sequence:
        """Queue its request from zero and for fresh pages: the old ones may still be written to."""
        retries = parted.retries + 1
        again = replace(parted, page_indices=(), tail_slot=None, remote=remote, retries=retries)
        self._scheduler.add(again)
        return again

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

    def on_released(self, attempt: int) -> None:
        """Nothing can land any more: free what a failed or cancelled attempt still owns."""
        owner = self._owners.pop(attempt, None)
        if owner is not None:  # else it runs, or was freed already
            assert owner.attempt is None, f"attempt {attempt} is released, but still waited for"
            self._scheduler.release(owner)
