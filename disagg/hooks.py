"""What an engine and a messenger say to each other: the seam between computing and moving KV.

Neither imports the other. The engine calls `PrefillHooks` or `DecodeHooks`; the messenger posts
`EngineEvent`s into a queue that the engine drains between two steps. `serve/node.py` puts the two
together.

    decoder    engine --on_fetch, on_cancel-------> messenger   (pages pinned, slot taken)
               engine <--KVFailed, KVStuck, at last KVEnded-- messenger
    prefiller  engine <--StartPrefill, ReleasePrefill-------- messenger
               engine --on_step_scheduled(base, chunks)--> messenger

Only the engine touches the page allocator. Pages named in an `on_fetch` belong to that attempt
until the messenger says `KVEnded`, once for each attempt and after all else about it; pages of a
prefill job belong to the job until `ReleasePrefill`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from disagg.config import OnFailure
from disagg.request import SamplingParams, TransferStats


class FetchKV(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to have a prompt prefilled elsewhere.

    `attempt` is a number (u64) that no other attempt of any engine has: it names this one on both
    nodes, in messages, in its tail and as a prefiller's job. `page_indices` lists the pages for
    prompt positions 0..N-2, `ceil((N-1) / page_size)` of them. `retries` counts earlier attempts.
    `dp_rank` is the data-parallel group of ranks that has the pages.
    """

    attempt: int
    token_ids: tuple[int, ...]
    page_indices: tuple[int, ...]
    tail_slot: int
    retries: int = 0
    dp_rank: int = 0


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one sequence in one step: positions `[first_token, first_token + len(token_ids))`.

    `number` is the request's or, of a prefill job, the job's. `page_indices` are all that the
    sequence has. `sampling` is set if the step samples a token after the last, which is output
    token number `output_index` of its request (from 0). The last span of a job, which ends at
    position N-2, has a `tail_slot`, where the step copies the last hidden state.

    With speculation, `drafts` are guesses of what follows the tokens, computed with them, and
    `next_token` is what follows a chunk of a prompt. `num_drafts` guesses are wanted for what comes
    then, as far as the `num_left` tokens that may still come allow. A span that begins after a
    fetch gets its own first, from the hidden state in tail slot `drafts_from`.
    """

    number: int
    first_token: int
    token_ids: tuple[int, ...]
    page_indices: tuple[int, ...]
    sampling: SamplingParams | None = None
    tail_slot: int | None = None
    output_index: int = 0
    drafts: tuple[int, ...] = ()
    next_token: int | None = None
    num_drafts: int = 0
    num_left: int = 0
    drafts_from: int | None = None

    @property
    def positions(self) -> range:
        """Of the tokens and the drafts."""
        return range(self.first_token, self.first_token + len(self.token_ids) + len(self.drafts))

    def num_wanted(self, num_chosen: int) -> int:
        """How many guesses to make when this span has brought so many tokens, or none yet: one of
        what is left is never guessed, for it comes with the others."""
        return max(0, min(self.num_drafts, self.num_left - num_chosen - 1))


class PrefillHooks(Protocol):
    """What a prefiller's engine calls; returns at once."""

    def on_step_scheduled(self, base: int, chunks: Sequence[Span]) -> None:
        """A step is about to run that starts at layer counter `base`, with these spans of jobs."""


class DecodeHooks(Protocol):
    """What a decoder's engine calls; every call returns at once."""

    def on_fetch(self, fetch: FetchKV) -> None:
        """Pages and a tail slot are pinned for a prompt; have it prefilled elsewhere."""

    def on_cancel(self, attempt: int) -> None:
        """Nobody wants this attempt's KV any more: let it end soon.

        What the messenger had posted for it before, its end included, crosses this call.
        """


class KVFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt will not complete. Its pages and slot stay its own until `KVEnded`."""

    attempt: int
    why: str
    then: OnFailure


class KVStuck(msgspec.Struct, frozen=True, kw_only=True):
    """A lost prefiller hangs inside a copy into what this failed or cancelled attempt owns; nobody
    knows how long. `KVEnded` still follows, if that process ever goes on or ends."""

    attempt: int


class KVEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing can land in the pages and the tail slot of the attempt any more.

    With `transfer` every write has landed and the tail carries the attempt's id: if the request
    still waits, decode may start. Without, the attempt has failed or was cancelled.
    """

    attempt: int
    transfer: TransferStats | None = None


class StartPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """Compute positions 0..N-2 of a prompt of N >= 2 tokens. `job` is its attempt's number."""

    job: int
    token_ids: tuple[int, ...]


class ReleasePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """No write reads the job's pages or its tail slot any more, and none will: drop the job."""

    job: int


EngineEvent = KVFailed | KVStuck | KVEnded | StartPrefill | ReleasePrefill
