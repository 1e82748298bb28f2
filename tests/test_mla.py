"""Latent attention: its two forms are one function, and which of them a step takes."""

from __future__ import annotations

import pytest
import torch

from disagg.kv_layout import PageOrder
from disagg.model.mla import LatentAttention, softmax_scale
from disagg.model.shape import read_config
from tests.test_transformer import (
    PROMPT,
    Stepper,
    assert_logits,
    reference_logits,
    scattered_pages,
)
from tests.tiny_models import loaded, make_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"), family="deepseek_v3")


def first_layer(folder) -> LatentAttention:
    return loaded(folder, "float32")._layers[0].self_attn


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("qo_len", [1, 2, 5])
def test_absorbed_and_plain_form_are_equal(folder, batch, qo_len):
    layer = first_layer(folder)
    generator = torch.Generator().manual_seed(qo_len)
    q = torch.randn(batch, qo_len, 4, 24, generator=generator)
    latents = torch.randn(batch, 1, 7, 40, generator=generator)
    mask = torch.zeros(batch, 1, qo_len, 7)
    mask.masked_fill_(torch.rand(mask.shape, generator=generator) < 0.4, float("-inf"))
    mask[..., 0] = 0.0
    plain, absorbed = layer.attend_plain(q, latents, mask), layer.attend_absorbed(q, latents, mask)
    assert plain.shape == absorbed.shape == (batch, qo_len, 4, 12)
    torch.testing.assert_close(absorbed, plain)


def test_the_absorbed_form_is_for_few_tokens(folder):
    """Multiplications for a key and a head: 72 a query absorbed; 36 a query and 896 once plain."""
    assert first_layer(folder)._max_absorbed == 896 // (72 - 36) == 24


@pytest.mark.parametrize("form", ["attend_plain", "attend_absorbed"])
@pytest.mark.parametrize("chunk_size", [1, 4, 31])
def test_either_form_gives_the_logits_of_transformers(folder, monkeypatch, form, chunk_size):
    other = {"attend_plain", "attend_absorbed"} - {form}
    monkeypatch.setattr(LatentAttention, other.pop(), getattr(LatentAttention, form))
    stepper = Stepper(loaded(folder, "float32"), PageOrder.HND)
    pages = scattered_pages(8)
    parts = [
        stepper.step([(PROMPT[first : first + chunk_size], first, pages)])[0]
        for first in range(0, len(PROMPT), chunk_size)
    ]
    assert_logits(torch.cat(parts), reference_logits(folder, PROMPT))


@pytest.mark.parametrize(
    "shape",
    [
        {"v_head_dim": 40},  # longer than a key
        {
            "v_head_dim": 7,
            "qk_nope_head_dim": 5,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        },
        {"kv_lora_rank": 4},  # absorbing always pays
        {"kv_lora_rank": 200, "num_experts_per_tok": 8, "topk_group": 4},
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "rms_norm_eps": 1e-2},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["attend_plain", "attend_absorbed"])
def test_odd_shapes_give_the_logits_of_transformers(tmp_path, monkeypatch, shape, form):
    monkeypatch.setattr(LatentAttention, "_attend", attend_in(form))
    folder = make_tiny_llama(tmp_path, family="deepseek_v3", **shape)
    stepper, pages = Stepper(loaded(folder, "float32"), PageOrder.HND), scattered_pages(40)
    prompt = (PROMPT * 5)[:130]
    parts = [
        stepper.step([(prompt[first : first + 45], first, pages)])[0]
        for first in range(0, len(prompt), 45)
    ]
    assert_logits(torch.cat(parts), reference_logits(folder, prompt))


def attend_in(form):
    return lambda layer, q, kv, mask: getattr(layer, form)(q, kv[0], mask)


def test_pages_hold_one_latent_a_token_and_nothing_else(folder):
    config = read_config(folder)
    assert (config.num_kv_heads, config.head_dim, config.num_kv_vectors) == (1, 32 + 8, 1)
    assert Stepper(loaded(folder, "float32"), PageOrder.HND).kv_pages[0].shape == (40, 4, 40)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 0.25),
        # 0.1 * 0.5 * ln(40) + 1 = 1.18444, squared.
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}, 0.25 * 1.402898),
        ({"factor": 40.0}, 0.25),
        ({"factor": 40.0, "mscale": None, "mscale_all_dim": None}, 0.25),
        ({"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.25),
    ],
)
def test_scale_of_the_softmax(tmp_path, rope, expected):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64} | rope
    folder = make_tiny_llama(
        tmp_path, family="deepseek_v3", qk_nope_head_dim=8, rope_parameters=yarn
    )
    assert softmax_scale(read_config(folder)) == pytest.approx(expected, rel=1e-5)
