"""Mixture of experts: a router sends each token to a few of many small MLPs.

    x [T, H] --router--> k experts a token, and their weights
    tokens     0  1  2            expert 1: token 1     --MLP--.
    experts   3,5 1,3 5,3   ->    expert 3: tokens 0 1 2 -MLP--+--> weighted sum of each token's
                                  expert 5: tokens 0 2  --MLP--'

Rows are sorted by expert, so each expert maps all of its rows at once. The experts are shared by
the ranks of a group; what a rank returns is a part of a sum, as of a row-parallel map.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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


class ExpertLinear:
    """One map for each expert, of rows that are sorted by expert."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """`weights` are `[out_features, in_features]` each."""
        self._maps = [Linear(weight) for weight in weights]
        plain = [each.plain for each in self._maps if each.plain is not None]
        self._stacked: Tensor | None = None
        # One kernel for all small maps saves a call from Python for each. It wants rows of whole
        # 16 bytes.
        if plain and len(plain) == len(weights) and not any(n % 8 for n in plain[0].shape):
            self._stacked, self._maps = torch.stack(plain).transpose(1, 2), []

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map `[R, in_features]`, of which each expert has its `counts`: `[R, out_features]`."""
        if self._stacked is not None:
            return F.grouped_mm(rows, self._stacked, offs=counts.cumsum(0, dtype=torch.int32))
        busy = [(each, n) for each, n in zip(self._maps, counts.tolist(), strict=True) if n]
        parts = torch.split(rows, [n for _, n in busy])
        return torch.cat([each(part) for (each, _), part in zip(busy, parts, strict=True)])


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """`gate_up` (rows of gate, then rows of up) and `down` are the MLPs of the experts `mine`, this
    rank's; `shared` is its part of an MLP that all tokens pass."""

    router: Router
    gate_up: ExpertLinear
    down: ExpertLinear
    mine: range
    shared: GatedMLP | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to this rank's part of the same shape."""
        weights, chosen = (each.flatten() for each in self.router(x))  # [T * k]
        counts = chosen.bincount(minlength=self.mine.stop)[: self.mine.stop]
        before, counts = counts[: self.mine.start].sum(), counts[self.mine.start :]
        # Places in [T * k] whose expert is here, sorted by expert.
        here = chosen.argsort()[before : before + counts.sum()]
        total = torch.zeros_like(x) if self.shared is None else self.shared(x)
        if not len(here):
            return total
        tokens = here // (len(chosen) // len(x))
        outputs = self.down(gated(self.gate_up(x[tokens], counts)), counts)
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

    def weight_of(expert: int, name: str) -> Tensor:
        shape = (hidden, size) if name == "down_proj" else (size, hidden)
        end = None if expert in mine else 0
        return read(f"{prefix}experts.{expert}.{name}.weight", shape, lambda weight: weight[:end])

    gate_up, down = [], []
    for expert in range(config.num_experts):
        gate_up.append(torch.cat([weight_of(expert, "gate_proj"), weight_of(expert, "up_proj")]))
        down.append(weight_of(expert, "down_proj"))
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
        gate_up=ExpertLinear([gate_up[expert] for expert in mine]),
        down=ExpertLinear([down[expert] for expert in mine]),
        mine=range(mine[0], mine[-1] + 1),
        shared=shared,
    )
