"""From logits to the next tokens."""

from __future__ import annotations

from torch import Tensor


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row of `logits` `[rows, vocab_size]`, the first one of equals.

    Compared in float32 whatever the dtype, so that a tie made by rounding is always the same tie.
    """
    tokens: list[int] = logits.float().argmax(dim=-1).tolist()
    return tokens
