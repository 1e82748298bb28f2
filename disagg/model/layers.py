"""The parts that every decoder-only model here is made of, as plain tensors and plain functions.

Linear maps (several of a checkpoint's matrices fused into one), the gated MLP, rotary position
embedding. How they are put together is `transformer.py`; where tensors come from is `weights.py`.

    rope, one head of one token, pairs (a, b):   a' = a cos - b sin
                                                 b' = b cos + a sin
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.model.rank_group import RankGroup

#: Tokens of a step that weights are laid out for. One laid out for 1 is up to twice as slow at 16;
#: one laid out for 16 loses nothing at 1.
PACKED_FOR = 16
#: A weight of up to so many elements is used as it is: a call of a kernel for weights that are laid
#: out takes 20 to 30 µs more than torch's own, and reading the weight no longer.
SMALL_WEIGHT = 1 << 18


Cut = Callable[[Tensor], Tensor]


class ReadTensor(Protocol):
    """Reads a checkpoint's tensor by its Hugging Face name, in the dtype the model runs in."""

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = lambda tensor: tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The tensor, or what `cut` makes of it: no more than that is read and converted.
        ValueError if it is missing or not of that shape. `dtype` is another than the model's."""


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype in which a model is computed whose weights and KV are `stored`.

    bfloat16 becomes float32 on a CPU that does not multiply it itself: torch then emulates it, and
    a chunk of 512 tokens took eight times as long.
    """
    if stored == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return stored


class Linear:
    """`x @ weight.T + bias`: weight `[out_features, in_features]`, bias `[out_features]`.

    The weight is laid out once, one layout for all batch sizes, unless it is small: then it is
    `plain`. `x` and the result are in `compute_dtype(weight.dtype)`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        computed = compute_dtype(weight.dtype)
        self._bias = None if bias is None else bias.to(computed)
        self._half: torch.ScriptObject | None = None
        self.plain: Tensor | None = None
        if weight.dtype != computed and _fits_half(weight):
            # A step of few tokens takes as long as reading the weights: so half the bytes, which
            # are widened on the way.
            self._half = torch.ops.quantized.linear_prepack_fp16(weight.float(), self._bias)
        elif weight.numel() <= SMALL_WEIGHT:
            self.plain = weight.to(computed)
        else:
            laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.to(computed), PACKED_FOR)
            self._packed = laid_out

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, in_features]` to `[T, out_features]`."""
        if self._half is not None:
            mapped: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._half)
            return mapped
        if self.plain is not None:
            return F.linear(x, self.plain, self._bias)
        num_tokens, added = x.shape[0], _num_added(x.shape[0])
        if added:
            x = F.pad(x, (0, 0, 0, added))
        mapped = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return mapped[:num_tokens]


def _fits_half(weight: Tensor) -> bool:
    """Whether float16 holds bfloat16 weights: they have fewer bits, but a larger range. Those that
    are too small for it may be off by up to 2**-16 of the largest."""
    if "x86" not in torch.backends.quantized.supported_engines:
        return False
    lost = (weight.half().float() - weight.float()).abs().max()
    return bool(lost <= weight.abs().max() * 2**-16)


def _num_added(num_tokens: int) -> int:
    """Rows to fill up with. oneDNN compiles a kernel for each number of rows it meets (some
    milliseconds, and a third of a megabyte that stays): from 8 on, four for each power of two."""
    return -num_tokens % (1 << max(0, num_tokens.bit_length() - 3))


class RMSNorm:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, squares summed in float32.

    torch's own is twice as many small operations on the CPU, and they add up in a decode step.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        # Over n elements the divisor is sqrt(norm^2 + n eps) / sqrt(n): a hypotenuse.
        self._scaled = weight.float() * math.sqrt(weight.shape[0])
        self._other_side = torch.tensor([math.sqrt(weight.shape[0] * eps)])

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to the same shape."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(norm, self._other_side)).mul_(self._scaled).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up fused: rows of gate, then rows of up."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to the same shape."""
        return self.down(gated(self.gate_up(x)))


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * intermediate_size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def read_columns(
    read: ReadTensor,
    group: RankGroup,
    prefix: str,
    out_features: Mapping[str, int],
    in_features: int,
    bias: bool,
    unit: int = 1,
) -> Linear:
    """This rank's outputs of the matrices `prefix + name`, stacked in the order of `out_features`
    (the whole model's number of them, by name); each is cut in whole heads of `unit` features.

    A fused map reads its input once and is one kernel call instead of several. ValueError as
    `ReadTensor`, or if a matrix cannot be shared.
    """
    weights, biases, cut = [], [], partial(group.cut, axis=0, unit=unit)
    for name, rows in out_features.items():
        weights.append(read(f"{prefix}{name}.weight", (rows, in_features), cut))
        if bias:
            biases.append(read(f"{prefix}{name}.bias", (rows,), cut))
    return Linear(torch.cat(weights), torch.cat(biases) if biases else None)


def read_row(
    read: ReadTensor, group: RankGroup, name: str, shape: tuple[int, int], bias: bool
) -> Linear:
    """This rank's inputs of the matrix `name`, of `shape` `[out_features, in_features]`: it maps
    `[T, in_features / tp]` to a part `[T, out_features]` of a sum over all ranks. Rank 0's part has
    the bias. ValueError as `read_columns`."""
    added = read(f"{name}.bias", shape[:1]) if bias else None
    weight = read(f"{name}.weight", shape, partial(group.cut, axis=1))
    return Linear(weight, added if group.rank == 0 else None)


def read_norm(read: ReadTensor, name: str, size: int, eps: float) -> RMSNorm:
    """ValueError as `ReadTensor`."""
    return RMSNorm(read(f"{name}.weight", (size,)), eps)


def read_mlp(
    read: ReadTensor, group: RankGroup, prefix: str, hidden: int, size: int, bias: bool = False
) -> GatedMLP:
    """This rank's part of an MLP with `size` features between its maps. ValueError as
    `read_columns`."""
    gate_up = {"gate_proj": size, "up_proj": size}
    return GatedMLP(
        gate_up=read_columns(read, group, prefix, gate_up, hidden, bias),
        down=read_row(read, group, f"{prefix}down_proj", (hidden, size), bias),
    )


class Rope:
    """Rotary position embedding of the tokens of one step, the same in all layers.

    A table of all positions would save a few small operations and cost 128 MB at a context of
    131072.
    """

    def __init__(
        self, angles: Tensor, factor: float, interleaved: bool, dtype: torch.dtype
    ) -> None:
        """`angles` is float32 `[T, head_dim / 2]`; sines and cosines are multiplied by `factor`.
        Pairs are halves of a head or, `interleaved`, neighbours."""
        self._interleaved = interleaved
        cos, sin = angles.cos() * factor, angles.sin() * factor
        tables = (cos, cos), (-sin, sin)  # of a pair's first and second
        join = partial(torch.stack, dim=-1) if interleaved else partial(torch.cat, dim=-1)
        self._cos, self._sin = (join(table).flatten(1).to(dtype).unsqueeze(1) for table in tables)

    def __call__(self, x: Tensor) -> None:
        """Turn each head of `x` `[T, num_heads, head_dim]` to its token's position, in place."""
        if self._interleaved:
            others = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            others = x.roll(x.shape[-1] // 2, dims=-1)
        # The sign of the sine is in the table.
        torch.addcmul(x * self._cos, others, self._sin, out=x)
