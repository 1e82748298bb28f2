"""From logits to the next tokens: the likeliest, or one drawn at random, and log-probabilities.

There is no generator whose state could depend on who else is in the batch. A draw is a function of
(seed, how many tokens the request has) alone, so a request that is computed in another batch, on
another node or once more draws the same.

    logits --/ temperature, exp--> weights --top_k, top_p--> some 0 --sums--> |0|..|.|...|
                                          hash(seed, index) -> u * total --------------^ token

The weights stay in the order of the vocabulary: rounding errors then only shift borders a little,
where in order of size two weights that are almost equal could change places.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from disagg.request import SamplingParams, TokenLogprobs

#: Of one row: float64 `[vocab_size]`, probabilities times a number that makes the largest 1.
Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A chosen token; `logprobs` is set if the request asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(
    logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]
) -> list[Sampled]:
    """The next token of each row of `logits` `[rows, vocab_size]`.

    `output_indices[i]` is how many output tokens row i's request has already. A request that draws
    must have its seed.
    """
    sampled = []
    for row, likeliest, wish, index in zip(
        logits, greedy(logits), params, output_indices, strict=True
    ):
        token = draw(row, wish, index) if wish.temperature > 0 else likeliest
        logprobs = None if wish.logprobs is None else _logprobs(row, token, wish.logprobs)
        sampled.append(Sampled(token_id=token, logprobs=logprobs))
    return sampled


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row of `logits` `[rows, vocab_size]`, the first one of equals.

    Compared in float32 whatever the dtype, so that a tie made by rounding is always the same tie;
    by numpy, which takes a tenth of torch's time for it on a CPU.
    """
    tokens: list[int] = logits.float().numpy(force=True).argmax(axis=-1).tolist()
    return tokens


def draw(logits: Tensor, wish: SamplingParams, index: int) -> int:
    """A token drawn from `logits` `[vocab_size]` by the weights that the wish leaves.

    The smaller the temperature, the nearer are all weights but the largest to 0.
    """
    exact = logits.double()
    weights = ((exact - exact.max()) / wish.temperature).exp().numpy(force=True)
    sums = cut(weights, wish).cumsum()
    # The first sum above a point that is below the last one: never a token of weight 0.
    return int(sums.searchsorted(uniform(wish.seed, index) * sums[-1], side="right"))


def uniform(seed: int | None, index: int) -> float:
    """A number in [0, 1), a multiple of 2**-53: the first bits of a hash of its arguments."""
    assert seed is not None, "a request that draws got no seed"
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def cut(weights: Weights, wish: SamplingParams) -> Weights:
    """The weights with a 0 where `top_k` and `top_p` leave a token out.

    Of equal weights at the border, those of smaller token ids stay.
    """
    if wish.top_k is None and wish.top_p == 1:
        return weights
    # By numpy, which takes a tenth of torch's time for it on a CPU.
    largest = -np.sort(-weights)[: wish.top_k]
    sums = largest.cumsum()
    count = len(largest)
    if wish.top_p < 1:  # those stay whose larger ones do not reach the share
        count = 1 + int(sums[:-1].searchsorted(wish.top_p * sums[-1]))
    smallest = largest[count - 1]
    is_kept = weights > smallest
    is_kept[np.flatnonzero(weights == smallest)[: count - is_kept.sum()]] = True
    return np.where(is_kept, weights, 0.0)


def _logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of a token and the `count` likeliest, from `logits` `[vocab_size]`."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(logprob=float(logprobs[token]), top=tuple(pairs))
