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
import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.request import SamplingParams, TokenLogprobs


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
    tokens = greedy(logits)
    rows = [i for i, wish in enumerate(params) if wish.temperature > 0]
    if rows:
        wishes = [params[i] for i in rows]
        draws = [
            uniform(wish.seed, output_indices[i]) for i, wish in zip(rows, wishes, strict=True)
        ]
        weights = cut(heat(logits[rows], wishes), wishes)
        for i, token in zip(rows, pick(weights, draws), strict=True):
            tokens[i] = token
    found = _logprobs(logits, tokens, params)
    return [Sampled(token_id=token, logprobs=found.get(i)) for i, token in enumerate(tokens)]


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row of `logits` `[rows, vocab_size]`, the first one of equals.

    Compared in float32 whatever the dtype, so that a tie made by rounding is always the same tie;
    by numpy, which takes a tenth of torch's time for it on a CPU.
    """
    tokens: list[int] = logits.float().numpy(force=True).argmax(axis=-1).tolist()
    return tokens


def uniform(seed: int | None, index: int) -> float:
    """A number in [0, 1), a multiple of 2**-53: the first bits of a hash of its arguments."""
    assert seed is not None, "a request that draws got no seed"
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def heat(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Weights, float64 `[rows, vocab_size]`: probabilities times a number that makes the largest 1.

    The smaller the temperature, the nearer are all but the largest to 0.
    """
    temperatures = torch.tensor([[wish.temperature] for wish in params], dtype=torch.float64)
    exact = logits.double()
    return ((exact - exact.amax(dim=-1, keepdim=True)) / temperatures).exp()


def cut(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`weights` `[rows, vocab_size]` with a 0 where `top_k` and `top_p` leave a token out.

    Of equal weights at the border, those of smaller token ids stay.
    """
    rows = [i for i, wish in enumerate(params) if wish.top_k is not None or wish.top_p < 1]
    if not rows:
        return weights
    some = weights[rows]
    # By numpy, which takes a tenth of torch's time for it on a CPU.
    largest = torch.from_numpy(-np.sort(-some.numpy(force=True)))
    vocab_size = some.shape[-1]
    top_k = torch.tensor([[min(params[i].top_k or vocab_size, vocab_size)] for i in rows])
    top_p = torch.tensor([[params[i].top_p] for i in rows], dtype=torch.float64)
    sums = largest.where(torch.arange(vocab_size) < top_k, 0.0).cumsum(-1)
    before = F.pad(sums[:, :-1], (1, 0))  # the sum of all that are larger
    counts = ((before < top_p * sums[:, -1:]) | (top_p == 1)).sum(-1, keepdim=True).minimum(top_k)
    smallest = largest.gather(-1, counts - 1)
    above, equal = some > smallest, some == smallest
    is_kept = above | (equal & (equal.cumsum(-1) <= counts - above.sum(-1, keepdim=True)))
    return weights.index_copy(0, torch.tensor(rows), some.where(is_kept, 0.0))


def pick(weights: Tensor, draws: Sequence[float]) -> list[int]:
    """For each row of `weights` (float64) the token on whose part of the sum its draw falls."""
    sums = weights.cumsum(-1)
    at = torch.tensor(draws, dtype=torch.float64)[:, None] * sums[:, -1:]
    # The first sum above `at`, which is below the last one: never a token of weight 0.
    tokens: list[int] = torch.searchsorted(sums, at, right=True)[:, 0].tolist()
    return tokens


def _logprobs(
    logits: Tensor, tokens: Sequence[int], params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """By row, for the rows that ask for them."""
    counts = {i: wish.logprobs for i, wish in enumerate(params) if wish.logprobs is not None}
    if not counts:
        return {}
    logprobs = logits[list(counts)].float().log_softmax(dim=-1)
    top = logprobs.topk(min(max(counts.values()), logits.shape[-1]))
    chosen = logprobs.gather(-1, torch.tensor([[tokens[i]] for i in counts]))
    found = {}
    for row, (i, count) in enumerate(counts.items()):
        pairs = zip(
            top.indices[row, :count].tolist(), top.values[row, :count].tolist(), strict=True
        )
        found[i] = TokenLogprobs(logprob=float(chosen[row, 0]), top=tuple(pairs))
    return found
