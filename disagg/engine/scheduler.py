"""Which tokens of which sequences the next step computes. No tensors, no threads, no clock.

Continuous batching with chunked prefill: every step takes one token of each decoding sequence
first, then fills the rest of `max_batch_tokens` with chunks of prompts, in order of arrival.

    waiting --admit()--> fetching --ready()--> running --release()--> finished
          '--------------------------------------^  schedule() picks from `running`

Admission is first come, first served, and reserves all the pages a sequence can ever need. So a
running sequence never lacks a page: nothing is preempted and nothing deadlocks. The head of the
queue that does not fit now waits, and all behind it, so that small ones do not starve it.

A prefill job takes its tail slot with its last chunk, not at admission: slots then bound the jobs
that are being handed over, not those still computing. This cannot deadlock, since a job that has
a slot computes its last chunk in that same step and needs nothing more from this engine; the slot
comes back when its writes have ended. Jobs that wait for a slot get it in order of arrival.
"""

import bisect
import itertools
import secrets
from dataclasses import replace
from operator import attrgetter

from disagg.config import CacheConfig, ModelConfig, SchedulerConfig
from disagg.engine.page_allocator import PageAllocator
from disagg.engine.sequence import Sequence
from disagg.hooks import Span
from disagg.kv_layout import pages_for
from disagg.request import Request

#: What the next step computes: each sequence at most once.
Step = list[tuple[Sequence, Span]]


class Scheduler:
    """Queues, pages and tail slots of one engine; used by the engine thread alone.

    Only `new_request` and `new_job` may be called from any thread: they look at what never
    changes, and count.
    """

    def __init__(self, limits: SchedulerConfig, cache: CacheConfig, model: ModelConfig) -> None:
        self.limits = limits
        self.cache = cache
        self.model = model
        self.pages = PageAllocator(cache.num_pages)
        self.slots = PageAllocator(cache.num_tail_slots, kind="tail slot")
        # Both in order of `arrival`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._arrivals = itertools.count()

    def new_request(self, number: int, request: Request, *, remote: bool = False) -> Sequence:
        """A sequence for a request, not queued yet. `max_tokens` is clipped to the model's limit,
        and a request that draws tokens without a seed is given one.

        ValueError if it can never run: empty prompt, unknown token, longer than the model's
        positions or the whole pool.
        """
        prompt, sampling = request.prompt_token_ids, request.sampling
        self._check_prompt(prompt)
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        if sampling.temperature > 0 and sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(64))
        end_token_ids = () if sampling.ignore_eos else self.model.eos_token_ids
        max_tokens = min(sampling.max_tokens, self.model.max_positions - len(prompt))
        what = f"{len(prompt)} prompt tokens + max_tokens {max_tokens}"
        self._check_fits(len(prompt) + max_tokens, what)
        return Sequence(
            number=number,
            arrival=next(self._arrivals),
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=frozenset((*end_token_ids, *sampling.stop_token_ids)),
            remote=remote and len(prompt) >= 2,
        )

    def new_job(self, job: int, token_ids: tuple[int, ...]) -> Sequence:
        """A sequence that computes positions 0..N-2 of a prompt, not queued yet.

        ValueError if it can never run, as in `new_request`, or has less than 2 tokens.
        """
        self._check_prompt(token_ids)
        if len(token_ids) < 2:
            raise ValueError("a prompt of 1 token leaves nothing to prefill; decode it where it is")
        place, count = next(self._arrivals), len(token_ids) - 1
        self._check_fits(count, f"{count} tokens to prefill")
        return Sequence(number=job, arrival=place, tokens=list(token_ids), num_prompt_tokens=count)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that was queued before gets its old place back."""
        bisect.insort(self.waiting, sequence, key=attrgetter("arrival"))

    def admit(self) -> list[Sequence]:
        """Give pages to the head of the queue while it fits; return those to be fetched."""
        to_fetch: list[Sequence] = []
        while self.waiting:
            sequence = self.waiting[0]
            if sequence.remote and self.slots.num_free == 0:
                break
            # A prefix cache would hand out the pages it has of this prompt here, and ask for less.
            most_tokens = sequence.num_prompt_tokens + sequence.max_tokens
            pages = self.pages.allocate(pages_for(most_tokens, self.cache.page_size))
            if pages is None:
                break
            sequence.page_indices = pages
            self.waiting.pop(0)
            if sequence.remote:
                self._take_slot(sequence)
                to_fetch.append(sequence)
            else:
                bisect.insort(self.running, sequence, key=attrgetter("arrival"))
        return to_fetch

    def job(self, number: int) -> Sequence:
        """The prefill job of this number, which was not released yet."""
        return next(s for s in (*self.running, *self.waiting) if s.is_job and s.number == number)

    def ready(self, sequence: Sequence) -> None:
        """KV of positions 0..N-2 has landed in the pages of a fetching sequence: let it decode."""
        sequence.num_computed = sequence.num_prompt_tokens - 1
        bisect.insort(self.running, sequence, key=attrgetter("arrival"))

    def schedule(self) -> Step:
        """Pick the next step's tokens: decodes, then chunks, at most one span of a sequence."""
        budget = self.limits.max_batch_tokens
        step: Step = []
        # Sorting keeps the order of arrival among the decodes and among the rest.
        for sequence in sorted(self.running, key=lambda sequence: not sequence.is_decoding):
            if budget == 0 or len(step) == self.limits.max_batch_size:
                break
            span = self._cut_span(sequence, budget)
            if span is not None:
                step.append((sequence, span))
                budget -= len(span.token_ids) + len(span.drafts)
        return step

    def release(self, sequence: Sequence) -> None:
        """End a sequence and free what it owns. No step that names its pages may be running."""
        for sequences in (self.waiting, self.running):
            if sequence in sequences:
                sequences.remove(sequence)
        self.free_tail_slot(sequence)
        self.pages.free(sequence.page_indices)
        sequence.page_indices = ()

    def free_tail_slot(self, sequence: Sequence) -> None:
        """Give the tail slot back, if the sequence has one."""
        if sequence.tail_slot is not None:
            self.slots.free((sequence.tail_slot,))
            sequence.tail_slot = None

    def _cut_span(self, sequence: Sequence, budget: int) -> Span | None:
        """The next tokens of a running sequence, or None if its last chunk must wait for a slot, or
        it is a job that has computed everything."""
        count = sequence.num_pending
        if self.limits.speculate and not sequence.is_decoding and not sequence.is_job:
            count -= 1  # split or not, the last prompt token is the first that guesses follow
        count = min(count, budget)
        is_last = count == sequence.num_pending
        if count == 0 or (sequence.is_job and is_last and not self._take_slot(sequence)):
            return None
        end = sequence.num_computed + count
        in_prompt = sequence.is_job or end < sequence.num_prompt_tokens - 1
        num_left = 0 if in_prompt else sequence.max_tokens - sequence.num_output_tokens
        follows = sequence.tokens[end : end + 1] if self.limits.speculate else ()
        return Span(
            number=sequence.number,
            first_token=sequence.num_computed,
            token_ids=tuple(sequence.tokens[sequence.num_computed : end]),
            page_indices=sequence.page_indices,
            sampling=sequence.sampling if is_last else None,
            tail_slot=sequence.tail_slot if is_last and sequence.is_job else None,
            output_index=sequence.num_output_tokens,
            drafts=sequence.drafts[: budget - 1],
            next_token=follows[0] if follows else None,
            num_drafts=self.limits.speculate,
            num_left=num_left,
            drafts_from=None if sequence.is_job else sequence.tail_slot,
        )

    def _take_slot(self, sequence: Sequence) -> bool:
        """Take a tail slot for a sequence that has none; False means "not now"."""
        assert sequence.tail_slot is None, f"sequence {sequence.number} has a tail slot already"
        slots = self.slots.allocate(1)
        if slots is None:
            return False
        (sequence.tail_slot,) = slots
        return True

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        """ValueError unless the model can take this prompt and at least one token after it."""
        if not token_ids:
            raise ValueError("the prompt is empty; expected at least 1 token")
        for kind in {*map(type, token_ids)} - {int}:
            raise ValueError(f"token ids must be int, got {kind.__name__}; convert them with int()")
        self._check_vocabulary("prompt", token_ids)
        if len(token_ids) >= self.model.max_positions:
            raise ValueError(
                f"prompt too long for the model; expected at most {self.model.max_positions - 1}"
                f" tokens (max_positions less one to generate), got {len(token_ids)}; shorten it"
            )

    def _check_vocabulary(self, what: str, token_ids: tuple[int, ...]) -> None:
        wrong = next((t for t in token_ids if not 0 <= t < self.model.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"{what}: token id out of the vocabulary; expected 0 to"
                f" {self.model.vocab_size - 1}, got {wrong}; was it made with this model's"
                " tokenizer?"
            )

    def _check_fits(self, num_tokens: int, what: str) -> None:
        """ValueError if not even the empty pool has the pages: waiting would never end."""
        page_size, num_pages = self.cache.page_size, self.cache.num_pages
        if pages_for(num_tokens, page_size) > num_pages:
            raise ValueError(
                f"too large for the KV cache; expected at most {num_pages * page_size} tokens"
                f" ({num_pages} pages of {page_size}), got {what}; ask for less or add pages"
            )
