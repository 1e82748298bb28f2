"""Mixture of experts: a router sends each token to a few of many small MLPs.

    x [T, H] --router--> k experts a token, and their weights
    tokens     0  1  2            expert 1: token 1     --MLP--.
    experts   3,5 1,3 5,3   ->    expert 3: tokens 0 1 2 -MLP--+--> weighted sum of each token's
                                  expert 5: tokens 0 2  --MLP--'

Rows are sorted by expert, so there is one MLP call for each expert that has any. The experts are
shared by the ranks of a group; what a rank returns is a part of a sum, as of a row-parallel map.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from disagg.config import ModelConfig
from disagg.model.layers import GatedMLP, Linear, ReadTensor, gated, read_mlp
from disagg.model.rank_group import RankGroup


@dataclass(frozen=True, kw_only=True)
class Router:
    """Chooses experts: those of the largest softmax (Qwen3-MoE) or, with a `bias`, of the largest
    sigmoid plus bias (DeepSeek-V3, section 2.1.2 of its report), in float32.

    With a bias, the experts stand in `num_groups` groups, and only the `num_groups_chosen` best
    ones count, by the sum of their two best experts. The bias chooses; it is in no weight. Weights
    are made to sum up to 1 if `normalize`, then multiplied by `factor`.
    """

    scores: Linear
    num_chosen: int
    normalize: bool
    bias: Tensor | None = None
    num_groups: int = 1
    num_groups_chosen: int = 1
    factor: float = 1.0

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and numbers of the experts of `[T, hidden_size]`: `[T, k]` each."""
        scores = self.scores(x.float())  # [T, num_experts]
        if self.bias is None:
            weights, chosen = scores.softmax(-1).topk(self.num_chosen)
        else:
            scores = scores.sigmoid()
            groups = (scores + self.bias).view(len(x), self.num_groups, -1)
            best = groups.topk(2).values.sum(-1).topk(self.num_groups_chosen).indices
            closed = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
            open_scores = groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
            chosen = open_scores.topk(self.num_chosen).indices
            weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.factor, chosen


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """`experts` are this rank's, numbered from `first` on; `shared` is its part of an MLP that all
    tokens pass."""

    router: Router
    experts: Sequence[GatedMLP]
    first: int = 0
    shared: GatedMLP | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to this rank's part of the same shape."""
        weights, chosen = (each.flatten() for each in self.router(x))  # [T * k]
        last = self.first + len(self.experts)
        ends = [0, *chosen.bincount(minlength=last).cumsum(0).tolist()]
        # Places in [T * k] whose expert is here, sorted by expert.
        here = chosen.argsort()[ends[self.first] : ends[last]]
        total = torch.zeros_like(x) if self.shared is None else self.shared(x)
        if not len(here):
            return total
        tokens = here // (len(chosen) // len(x))
        sizes = [b - a for a, b in pairwise(ends[self.first : last + 1])]
        busy = [expert for expert, size in zip(self.experts, sizes, strict=True) if size]
        sizes = [size for size in sizes if size]
        # What is between the maps is done for all experts at once: fewer calls for the same rows.
        rows = zip(busy, torch.split(x[tokens], sizes), strict=True)
        gate_up = torch.cat([expert.gate_up(part) for expert, part in rows])
        rows = zip(busy, torch.split(gated(gate_up), sizes), strict=True)
        outputs = torch.cat([expert.down(part) for expert, part in rows])
        return total.index_add_(0, tokens, outputs * weights[here, None].to(x.dtype))


def read_experts(
    config: ModelConfig, read: ReadTensor, group: RankGroup, prefix: str
) -> MixtureOfExperts:
    """Whole experts: a rank has some of them, and of the others nothing but their names. ValueError
    as `ReadTensor`."""
    hidden, size, shared = config.hidden_size, config.moe_intermediate_size, None
    router = read(f"{prefix}gate.weight", (config.num_experts, hidden), dtype=torch.float32)
    bias = None
    if config.router_bias:
        name = f"{prefix}gate.e_score_correction_bias"
        bias = read(name, (config.num_experts,), dtype=torch.float32)
    mine = group.cut(torch.arange(config.num_experts), 0).tolist()
    experts = []
    for number in range(config.num_experts):
        expert = f"{prefix}experts.{number}."
        if number in mine:
            experts.append(read_mlp(read, RankGroup(), expert, hidden, size))
        else:
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, size) if name == "down_proj" else (size, hidden)
                read(f"{expert}{name}.weight", shape, lambda weight: weight[:0])
    if config.n_shared_experts:
        shared_size = config.n_shared_experts * size
        shared = read_mlp(read, group, f"{prefix}shared_experts.", hidden, shared_size)
    return MixtureOfExperts(
        router=Router(
            scores=Linear(router),
            num_chosen=config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
            bias=bias,
            num_groups=config.n_group,
            num_groups_chosen=config.topk_group,
            factor=config.routed_scaling_factor,
        ),
        experts=experts,
        first=mine[0],
        shared=shared,
    )
