"""Grouped-query attention of a layer against transformers' own, with norms of heads and without."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from disagg.kv_layout import PageOrder
from disagg.model.layers import Rope
from disagg.model.rank_group import RankGroup
from disagg.model.shape import read_config
from disagg.model.weights import load_model
from tests.test_transformer import Stepper
from tests.tiny_models import loaded, make_tiny_llama

LENGTH = 11


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_equals_transformers(tmp_path, family):
    folder = make_tiny_llama(tmp_path, family=family, attention_bias=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    model = loaded(folder, "float32")
    x = torch.randn(LENGTH, 64, generator=torch.Generator().manual_seed(0))
    angles = torch.outer(torch.arange(LENGTH), torch.tensor(model.config.rope_frequencies))
    stepper = Stepper(model, PageOrder.HND)
    stepper.attention.plan([range(LENGTH)], [[5, 0, 7]])
    with torch.inference_mode():
        positions = theirs.rotary_emb(x, torch.arange(LENGTH)[None])
        causal = torch.full((1, 1, LENGTH, LENGTH), float("-inf")).triu(1)
        for layer in (0, 2):
            attention = theirs.layers[layer].self_attn
            expected, _ = attention(x[None], positions, attention_mask=causal)
            rope = Rope(angles, 1.0, False, torch.float32)
            found = model._layers[layer].self_attn(
                x, rope, stepper.kv_pages[layer], stepper.attention
            )
            torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tp", "num_kv_heads", "expected"), [(1, 2, 2), (2, 2, 2), (4, 2, 1)])
def test_query_heads_that_share_a_kv_head_of_a_rank(tmp_path, tp, num_kv_heads, expected):
    folder = make_tiny_llama(tmp_path, num_key_value_heads=num_kv_heads)
    for rank in range(tp):
        model = load_model(read_config(folder), "float32", RankGroup(rank, tp))[0]
        assert model.group_size == expected
