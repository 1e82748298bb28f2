"""One prompt on its way through an engine: its tokens, how many are computed, what it owns.

A sequence is either a request that generates tokens or a prefill job that computes positions
0..N-2 for somebody else and never samples. Which sequences run is `scheduler.py`.

    waiting -> running -> finished            a request that computes everything here
    waiting -> fetching -> running ...        a request that has positions 0..N-2 computed elsewhere
       ^----------'                           the attempt failed, and its pages stay with a copy
    waiting -> running -> finished            a job: runs until nobody reads its pages any more

From each of them to finished: cancelled, or failed. A waiting or running sequence is in the list of
that name, a fetching one has an `attempt`. Running and fetching ones own pages, and so do those
whose attempt was given up, until it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.engine.stopwatch import Stopwatch
from disagg.request import FinishReason, Output, SamplingParams, TransferStats

#: Gets a request's output as it comes, `finish_reason` in the last. Called by the engine thread;
#: must return at once and not raise.
OnOutput = Callable[[Output], None]


@dataclass(kw_only=True, eq=False)
class Sequence:
    """`number` is the request's or the job's, `arrival` its place among all that came.

    `tokens` is the prompt, then the output; of a job, which has no `sampling`, the last one is not
    computed. `num_computed` of them have their KV in `page_indices`. `max_tokens` bounds the
    output. `drafts` guess what follows; `num_drafts` were checked so far, `num_accepted` right.
    `remote` asks for positions 0..N-2, of which there are some, to be fetched; `attempt` names the
    fetch under way, and `transfer` says what one that is over has moved.
    """

    number: int
    arrival: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams | None = None
    max_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    remote: bool = False
    on_output: OnOutput = lambda output: None

    num_computed: int = 0
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    page_indices: tuple[int, ...] = ()
    tail_slot: int | None = None
    attempt: int | None = None
    retries: int = 0
    finish: FinishReason | None = None
    transfer: TransferStats | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def is_job(self) -> bool:
        """Whether it is computed for somebody else."""
        return self.sampling is None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that are known and wait to be computed."""
        return len(self.tokens) - self.num_computed - self.is_job

    @property
    def is_decoding(self) -> bool:
        """Whether its next token is an ordinary decode token; the last prompt token is one, too."""
        return not self.is_job and self.num_computed >= self.num_prompt_tokens - 1

    def accept(self, token: int) -> None:
        """Append a sampled token, and set `finish` if it ends the output.

        One that is both the last allowed and a stop token is a stop.
        """
        self.tokens.append(token)
        if token in self.stop_token_ids:
            self.finish = FinishReason.STOP
        elif self.num_output_tokens >= self.max_tokens:
            self.finish = FinishReason.LENGTH
