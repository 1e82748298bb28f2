"""What a client asks for, and what it is answered.

Frozen data. How far a request has come is the engine's business (`engine/sequence.py`); how its
KV travels is the messenger's.
"""

import enum
import sys
from dataclasses import dataclass, field
from typing import Annotated, get_type_hints

from msgspec import Meta, ValidationError, convert

MAX_LOGPROBS = 20


class FinishReason(enum.StrEnum):
    """Why a request's tokens ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How output tokens are chosen and when they stop.

    `temperature` 0 takes the likeliest token. Else a token is drawn with the probabilities
    softmax(logits / temperature), of which the `top_k` largest are kept, and of those the fewest
    likeliest that sum to `top_p` of them. The draw depends on `seed` and on how many tokens were
    drawn before, on nothing else; without a seed the engine takes a random one.

    The model's end tokens (unless `ignore_eos`) and `stop_token_ids` end the output and are part of
    it. `stop` strings end it too; they are found by whoever makes text (`serve/answer.py`).
    `logprobs` asks for log-probabilities of each chosen token and of that many likeliest ones.

    ValueError names a field that is out of range.
    """

    max_tokens: Annotated[int, Meta(ge=1)] = 128
    temperature: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 0.0
    top_k: Annotated[int, Meta(ge=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            try:
                convert(getattr(self, name), kind)
            except ValidationError as error:
                raise ValueError(f"{name}: {error}; got {getattr(self, name)!r}") from error


#: What each field of `SamplingParams` may be. Finding it out takes longer than checking.
_KINDS = get_type_hints(SamplingParams, include_extras=True)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities where an output token was chosen, in float32.

    Those of the model itself: softmax of the logits, before temperature, `top_k` and `top_p`.
    `top` holds (token id, logprob), the likeliest first, whether or not the chosen one is there.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """What moved for a request: the attempt that succeeded, after `retries` that did not.

    `prefiller` is HOST:PORT, `transport` how the writes came. In seconds, until this decoder's
    messenger had counted the last write: `exposed` since the prefiller's forward pass of the last
    chunk ended, when nothing but the transfer was left to do; `span` since the first write was
    posted there. So `1 - exposed / span` of the transfer went on behind computing.

    Both start on the prefiller's clock. The difference of the clocks is the smallest (received -
    sent) of its heartbeats, so both are too short by the travel of the fastest one (on one host
    some 50 us, more if the reader was late), and never below 0. Both are 0 until one has come.
    """

    prefiller: str
    transport: str
    writes: int
    bytes: int
    retries: int
    exposed: float
    span: float


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Where a request's time went: seconds on the decoder's monotonic clock, read by its engine.

    queue              from `submit` until its prefill begins: it is asked of a prefiller, or a step
                       with the first part of its prompt starts here
    prefill            from there until the engine has the KV of positions 0..N-2: `KVEnded` is
                       taken in, or the step ends that computed the last prompt token here. Failed
                       attempts, the prefiller's own queue and the transfer are part of it
    transfer           the end of the prefill that only waits for the transfer: from the end of the
                       prefiller's last forward pass until all has landed (`TransferStats.exposed`)
    first_token        from `submit` until the first output token is delivered
    inter_token_mean,  between the deliveries of one output token and the next; the p99 is the
    inter_token_p99    smallest of these times that 99 % of them do not exceed

    None where the request did not come that far, or where there is nothing to measure.
    """

    queue: float | None
    prefill: float | None
    transfer: float | None
    first_token: float | None
    inter_token_mean: float | None
    inter_token_p99: float | None


@dataclass(frozen=True, kw_only=True)
class Output:
    """What the engine delivers: new tokens of a request and, in the last one, how it ended.

    `logprobs` has an item for each token if they were asked for, else none. The fields after it are
    set in the last output only: `error` if the reason is ERROR, `transfer` if KV was fetched,
    `num_drafts` and `num_accepted` say how many tokens were guessed and how many of them rightly.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    timings: Timings | None = None
    transfer: TransferStats | None = None
    num_drafts: int = 0
    num_accepted: int = 0
