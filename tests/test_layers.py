"""The shared layer parts against transformers and against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from disagg.model import layers
from disagg.model.layers import (
    GatedMLP,
    Linear,
    RMSNorm,
    Rope,
    compute_dtype,
    read_columns,
)
from disagg.model.rank_group import RankGroup

PLAIN = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("apply", "interleaved"),
    [(apply_rotary_pos_emb, False), (apply_rotary_pos_emb_interleave, True)],
)
def test_rope_equals_transformers(apply: Callable[..., Any], interleaved: bool) -> None:
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=PLAIN)
    )
    positions = torch.tensor([0, 1, 2, 63, 64, 1000, 7, 5000])
    x = torch.randn(len(positions), 2, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary(x, positions[None])
    q = x.transpose(0, 1)[None]
    expected = apply(q, q, 0.5 * cos, 0.5 * sin)[0][0].transpose(0, 1)

    rope = Rope(torch.outer(positions, rotary.inv_freq), 0.5, interleaved, torch.float32)
    rope(x)

    if interleaved:  # theirs puts the first of each pair in front, which changes no q . k
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_leaves_position_zero_and_lengths_alone(interleaved: bool) -> None:
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1))
    angles = torch.outer(torch.tensor([0, 5, 9]), torch.rand(8))
    turned = x.clone()
    Rope(angles, 1.0, interleaved, torch.float32)(turned)
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("bias", [False, True])
def test_fused_linear_is_the_parts_side_by_side_in_the_order_given(bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    stored = {
        f"block.{name}.{kind}": torch.randn(*shape, generator=generator)
        for name, rows in (("second", 3), ("first", 5))
        for kind, shape in (("weight", (rows, 4)), ("bias", (rows,)))
    }
    asked = []

    def read(name: str, shape: tuple[int, ...], cut: object = None) -> torch.Tensor:
        asked.append((name, shape))
        return stored[name]

    linear = read_columns(read, RankGroup(), "block.", {"first": 5, "second": 3}, 4, bias)

    x = torch.randn(2, 4, generator=generator)
    parts = []
    for name in ("first", "second"):
        part = x @ stored[f"block.{name}.weight"].T
        parts.append(part + stored[f"block.{name}.bias"] if bias else part)
    torch.testing.assert_close(linear(x), torch.cat(parts, dim=-1))
    assert (("block.first.weight", (5, 4)) in asked) and (
        (("block.second.bias", (3,)) in asked) == bias
    )


@pytest.mark.parametrize(("num_tokens", "bias"), [(1, False), (16, True), (19, True), (300, False)])
@pytest.mark.parametrize("small", [False, True])
def test_one_layout_of_a_weight_serves_all_batch_sizes(
    num_tokens: int, bias: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "SMALL_WEIGHT", 70 * 33 if small else 0)
    generator = torch.Generator().manual_seed(2)
    weight, offset = torch.randn(70, 33, generator=generator), torch.randn(70, generator=generator)
    x = torch.randn(num_tokens, 33, generator=generator)
    expected = x @ weight.T + (offset if bias else 0)
    torch.testing.assert_close(Linear(weight, offset if bias else None)(x), expected)


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("factor", [1.0, 1e5, 1e-6, 1e-12])
def test_bfloat16_weights_are_applied_as_they_are_stored(
    factor: float, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are beyond float16, or too small for it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    generator = torch.Generator().manual_seed(5)
    weight, offset = torch.randn(70, 33, generator=generator), torch.randn(70, generator=generator)
    weight, offset = (factor * weight).bfloat16(), (factor * offset).bfloat16()
    x = torch.randn(num_tokens, 33, generator=generator)
    expected = x @ weight.float().T + offset.float()
    torch.testing.assert_close(Linear(weight, offset)(x), expected, rtol=1e-5, atol=1e-5 * factor)


@pytest.mark.parametrize(("native", "computed"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_is_computed_in_float32_where_the_cpu_would_emulate_it(
    native: bool, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    assert compute_dtype(torch.bfloat16) == computed
    assert compute_dtype(torch.float32) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(*s, generator=generator) for s in ((5, 48), (48,)))
    x[0] = 1e-3 * x[0]  # where eps counts
    expected = F.rms_norm(x.to(dtype).float(), (48,), weight.to(dtype).float(), 1e-5)
    found = RMSNorm(weight.to(dtype), 1e-5)(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.float(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6
    )


def test_gated_mlp_gates_with_the_first_half() -> None:
    generator = torch.Generator().manual_seed(3)
    gate, up = (torch.randn(6, 4, generator=generator) for _ in range(2))
    down = torch.randn(4, 6, generator=generator)
    mlp = GatedMLP(gate_up=Linear(torch.cat([gate, up])), down=Linear(down))
    x = torch.randn(5, 4, generator=generator)
    gated = x @ gate.T
    torch.testing.assert_close(mlp(x), (gated * torch.sigmoid(gated) * (x @ up.T)) @ down.T)
