"""A finished answer as a JSON object, and the line that closes a run on a terminal."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from disagg.request import Output, Timings, TokenLogprobs
from disagg.serve.answer import Answer


def as_json(index: int, answer: Answer) -> dict[str, Any]:
    """What `--json` prints of prompt number `index`, which is answered. Times as in
    `request.Timings`, in ms."""
    done = answer.result()
    moved = done.transfer and asdict(done.transfer)
    found: dict[str, Any] = {
        "index": index,
        "token_ids": done.token_ids,
        "text": answer.text,
        "finish_reason": done.finish_reason,
        "usage": {
            "prompt_tokens": len(answer.request.prompt_token_ids),
            "completion_tokens": len(done.token_ids),
        },
        "timings_ms": done.timings and _milliseconds(done.timings),
        # `exposed` is in timings_ms, `span` explains it.
        "transfer": moved and {n: x for n, x in moved.items() if n not in ("exposed", "span")},
    }
    if answer.request.sampling.logprobs is not None:
        found["logprobs"] = [*map(_logprobs, done.token_ids, done.logprobs)]
    if done.error is not None:
        found["error"] = done.error
    return found


def summary(completions: Sequence[Output], seconds: float) -> str:
    """Tokens a second, mean time to first token, and what was moved, of all prompts together.

    Hidden is the share of the transfers' time in which prefillers computed, see `TransferStats`.
    """
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    known = [c.timings.first_token for c in completions if c.timings and c.timings.first_token]
    moved = [c.transfer for c in completions if c.transfer]
    first = f"{sum(known) / len(known):.3f} s to the first token" if known else "no first token"
    span = sum(stats.span for stats in moved)
    exposed = sum(stats.exposed for stats in moved)
    hidden = f", {100 * (1 - exposed / span):.0f} % of the transfer hidden" if span else ""
    return (
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s), {first},"
        f" {sum(stats.bytes for stats in moved) / 1e6:.2f} MB moved in"
        f" {sum(stats.writes for stats in moved)} writes{hidden}"
    )


def _milliseconds(timings: Timings) -> dict[str, float | None]:
    return {
        name.replace("first_token", "ttft"): value and round(1000 * value, 3)
        for name, value in asdict(timings).items()
    }


def _logprobs(token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": other, "logprob": logprob} for other, logprob in logprobs.top]
    return {"token_id": token_id, "logprob": logprobs.logprob, "top": top}
