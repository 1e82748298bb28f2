"""The parts that every decoder-only model here is made of, as plain tensors and plain functions.

Linear maps (several of a checkpoint's matrices fused into one), the gated MLP, rotary position
embedding. How they are put together is `gqa.py`; where tensors come from is `weights.py`.

    rope, one head of one token, halves a and b:   a' = a cos - b sin
                                                   b' = b cos + a sin
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.config import Llama3RopeScaling


class ReadTensor(Protocol):
    """Reads a checkpoint's tensor by its Hugging Face name, in the dtype the model runs in."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor; ValueError if it is missing or not of that shape."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """`x @ weight.T + bias`: weight `[out_features, in_features]`, bias `[out_features]`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up fused: rows of gate, then rows of up."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [T, intermediate_size] each
        return self.down(F.silu(gate) * up)


def read_linear(
    read: ReadTensor, prefix: str, out_features: Mapping[str, int], in_features: int, bias: bool
) -> Linear:
    """One Linear from the matrices `prefix + name`, stacked in the order of `out_features`.

    A fused map reads its input once and is one kernel call instead of several.
    """
    weights = [
        read(f"{prefix}{name}.weight", (rows, in_features)) for name, rows in out_features.items()
    ]
    biases = [read(f"{prefix}{name}.bias", (rows,)) for name, rows in out_features.items() if bias]
    return Linear(
        # A single matrix stays where it is (in the mapped file, if it needed no conversion).
        weight=weights[0] if len(weights) == 1 else torch.cat(weights),
        bias=torch.cat(biases) if biases else None,
    )


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3RopeScaling | None) -> Tensor:
    """Radians per position of each pair of a head's elements: float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    # Llama 3: a pair that turns at least high_freq_factor times within the original context stays,
    # one that turns less than low_freq_factor times is slowed by `factor`, between is a blend.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rope_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and signed sin for `apply_rope`, each `[T, 1, head_dim]`; positions int64 `[T]`.

    Made once per step and shared by all layers. A table of all positions would save a few small
    operations and cost 128 MB at a context of 131072.
    """
    angles = torch.outer(positions.float(), frequencies)  # [T, head_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
        torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
    )


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of `x` `[T, num_heads, head_dim]` to its token's position; same shape."""
    # Rolling by half a head puts b in front of a; the sign of its sine is in the table.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
