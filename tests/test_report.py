"""Finished answers as JSON and as the closing line, from made-up numbers."""

from __future__ import annotations

import json
from dataclasses import replace

from disagg.request import (
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Timings,
    TokenLogprobs,
    TransferStats,
)
from disagg.serve.answer import Answer, as_json
from disagg.serve.commands import summary

DONE = Output(
    token_ids=(5, 6),
    logprobs=(
        TokenLogprobs(logprob=-0.25, top=((5, -0.25), (9, -3.0))),
        TokenLogprobs(logprob=-2.0, top=((1, -0.5), (6, -2.0))),
    ),
    finish_reason=FinishReason.LENGTH,
    error=None,
    timings=Timings(
        queue=0.001,
        prefill=0.02,
        transfer=0.0035,
        first_token=0.5,
        inter_token_mean=0.0101234,
        inter_token_p99=0.0101234,
    ),
    transfer=TransferStats(
        prefiller="10.0.0.1:7400",
        transport="shm",
        writes=91,
        bytes=2_000_000,
        retries=1,
        exposed=0.0035,
        span=0.05,
    ),
)
REFUSED = Output(
    token_ids=(),
    logprobs=(),
    finish_reason=FinishReason.ERROR,
    error="why",
    timings=None,
    transfer=None,
)


def answered(output, num_prompt_tokens=0, text="", logprobs=1):
    """An answer that has ended like this."""
    sampling = SamplingParams(logprobs=logprobs)
    answer = Answer(Request(prompt_token_ids=(1,) * num_prompt_tokens, sampling=sampling))
    answer.put(output)
    answer.result()
    answer.text = text
    return answer


def test_everything_that_was_measured_is_in_the_object():
    found = as_json(3, answered(DONE, 36, "hi"))
    assert json.loads(json.dumps(found)) == {
        "index": 3,
        "token_ids": [5, 6],
        "text": "hi",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 36, "completion_tokens": 2},
        "timings_ms": {
            "queue": 1.0,
            "prefill": 20.0,
            "transfer": 3.5,
            "ttft": 500.0,
            "inter_token_mean": 10.123,
            "inter_token_p99": 10.123,
        },
        "transfer": {
            "prefiller": "10.0.0.1:7400",
            "writes": 91,
            "bytes": 2_000_000,
            "retries": 1,
            "transport": "shm",
        },
        "logprobs": [
            {
                "token_id": 5,
                "logprob": -0.25,
                "top": [{"token_id": 5, "logprob": -0.25}, {"token_id": 9, "logprob": -3.0}],
            },
            {
                "token_id": 6,
                "logprob": -2.0,
                "top": [{"token_id": 1, "logprob": -0.5}, {"token_id": 6, "logprob": -2.0}],
            },
        ],
    }


def test_what_was_not_asked_for_or_did_not_happen_is_not_there():
    found = as_json(0, answered(replace(REFUSED, error=None), logprobs=None))
    assert "logprobs" not in found
    assert "error" not in found
    found = as_json(0, answered(REFUSED))
    assert (found["logprobs"], found["error"]) == ([], "why")
    assert (found["timings_ms"], found["transfer"]) == (None, None)


def test_the_summary_sums_all_prompts():
    other = replace(DONE, timings=replace(DONE.timings, first_token=0.7), transfer=None)
    assert summary([DONE, REFUSED, other], 2.0) == (
        "4 tokens in 2.00 s (2.0 tokens/s), 0.600 s to the first token, 2.00 MB moved in 91 writes,"
        " 93 % of the transfer hidden"
    )
    assert "no first token, 0.00 MB moved in 0 writes" in summary([REFUSED], 2.0)
