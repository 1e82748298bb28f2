"""Attempts to have prompts prefilled elsewhere, and the pages that others may write into meanwhile.

A fetched page is the attempt's from `on_fetch` on. `KVReady` makes it the request's; otherwise it
is free only at `KVReleased`, when nothing can land in it any more, however long that takes. A
request that was cancelled or whose attempt failed leaves at once, without its pages. If that may be
for ever (`KVStuck`), requests that do not fit beside them are not kept waiting.

                      .-- KVReady ----> gone: pages and slot are the request's
    start (on_fetch) -+-- KVFailed ---> the request leaves, pages stay -.
                      '-- cancel -----> the request leaves, pages stay -'- KVReleased -> gone: free
"""

import itertools

from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import Sequence
from disagg.hooks import DecodeHooks, FetchKV, NextStep


class Attempts:
    """All attempts whose pages are not the request's or free yet; the engine thread's alone.

    Events may name attempts that are not known here, or that nobody waits for: answers that
    crossed a cancel. Ignoring them is harmless. Numbers never come back, so they cannot mean
    another attempt, and what may still land does so in pages that wait for `KVReleased`.
    """

    def __init__(self, scheduler: Scheduler, hooks: DecodeHooks | None) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._fetching: dict[int, Sequence] = {}
        #: Pages and tail slot of those that nobody waits for any more.
        self._parted: dict[int, tuple[tuple[int, ...], int]] = {}
        #: Which of those may never be released.
        self._stuck: set[int] = set()
        self._numbers = itertools.count(1)

    def start(self, sequence: Sequence) -> None:
        """Have positions 0..N-2 of a sequence that has its pages computed elsewhere."""
        assert sequence.tail_slot is not None, f"request {sequence.number} fetches without a slot"
        assert self._hooks is not None, f"request {sequence.number} fetches without a messenger"
        attempt = sequence.attempt = next(self._numbers)
        self._fetching[attempt] = sequence
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
        sequence = self._fetching.pop(attempt, None)
        if sequence is not None:
            self._scheduler.ready(sequence)
        return sequence

    def on_failed(self, attempt: int, then: NextStep) -> Sequence | None:
        """It will not complete: queue the request again, or end and return it if it is to fail."""
        if attempt not in self._fetching:
            return None
        sequence = self._part(attempt)
        if then is NextStep.FAIL:
            self._scheduler.release(sequence)
            return sequence
        # From zero and in fresh pages: the old ones may still be written into.
        sequence.remote = then is NextStep.RETRY
        sequence.retries += 1
        self._scheduler.add(sequence)
        return None

    def cancel(self, sequence: Sequence) -> None:
        """The request of a fetching sequence is not wanted any more; part it from its attempt."""
        hooks, attempt = self._hooks, sequence.attempt
        assert hooks is not None and attempt is not None, f"{sequence.number} fetches nothing"
        hooks.on_cancel(attempt)
        self._part(attempt)

    def on_stuck(self, attempt: int) -> None:
        """Count on its pages and slot no more, until they are released all the same."""
        if attempt in self._parted:
            self._stuck.add(attempt)

    def pop_hopeless(self) -> list[tuple[Sequence, str]]:
        """End the queued requests that all but what is stuck could not hold; each with its why."""
        if not self._stuck:
            return []
        pages, slots = self._scheduler.pages.capacity, self._scheduler.slots.capacity
        num_stuck = sum(len(self._parted[attempt][0]) for attempt in self._stuck)
        ended = []
        for sequence in list(self._scheduler.waiting):
            num_pages = self._scheduler.num_pages_of(sequence)
            no_slot = sequence.fetches and len(self._stuck) == slots
            if num_pages > pages - num_stuck or no_slot:
                self._scheduler.release(sequence)
                why = (
                    f"a prefiller hangs that may still write into {num_stuck} of {pages} pages and"
                    f" {len(self._stuck)} of {slots} tail slots; the rest cannot hold this request"
                    f" of {num_pages} pages; let that process go on, or end it"
                )
                ended.append((sequence, why))
        return ended

    def on_released(self, attempt: int) -> None:
        """Nothing can land any more: free what a failed or cancelled attempt still owns."""
        assert attempt not in self._fetching, f"attempt {attempt} is released, but still waited for"
        if attempt in self._parted:  # else they are the request's, or free already
            page_indices, tail_slot = self._parted.pop(attempt)
            self._stuck.discard(attempt)
            self._scheduler.pages.free(page_indices)
            self._scheduler.slots.free((tail_slot,))

    def _part(self, attempt: int) -> Sequence:
        sequence = self._fetching.pop(attempt)
        assert sequence.tail_slot is not None, f"request {sequence.number} fetches without a slot"
        self._parted[attempt] = (sequence.page_indices, sequence.tail_slot)
        sequence.disown()
        return sequence
