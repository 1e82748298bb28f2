"""Mixture of experts: a router sends each token to a few of many small MLPs.

    x [T, H] --router--> k experts a token, and their weights
    tokens     0  1  2            expert 3: tokens 0 2  --MLP--> x weight --.
    experts   3,5 1,3 5,3   ->    expert 5: tokens 0 2  --MLP--> x weight --+--> added to the
                                  expert 1: token 1     --MLP--> x weight --'    tokens' rows

Tokens are grouped by expert, so there is one MLP call for each expert that has any. The experts are
shared by the ranks of a group; what a rank returns is a part of a sum, as of a row-parallel map.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.model.layers import GatedMLP, Linear


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """`router` maps to a score for each expert of the model; `experts` are this rank's, by number.

    The weights of the `num_chosen` experts of a token are their probabilities (softmax over all
    experts); with `normalize` they are made to sum up to 1.
    """

    router: Linear
    experts: Mapping[int, GatedMLP]
    num_chosen: int
    normalize: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to this rank's part of the same shape."""
        weights, chosen = self.router(x).float().softmax(-1).topk(self.num_chosen)  # [T, k] each
        if self.normalize:
            weights /= weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype).flatten()
        order = chosen.flatten().argsort(stable=True)  # places in [T * k], by expert
        ends = chosen.flatten()[order].bincount().cumsum(0).tolist()
        total = torch.zeros_like(x)
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < end and expert in self.experts:
                places = order[start:end]
                tokens = places // self.num_chosen
                outputs = self.experts[expert](x[tokens]) * weights[places, None]
                total.index_add_(0, tokens, outputs)
        return total
