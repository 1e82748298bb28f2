"""Tiny random checkpoints, and what transformers makes of them: the oracle of most tests.

Three layers, four query heads, two KV heads: small enough to build in a tenth of a second, large
enough that grouping, head order and layer order show. Weights are drawn with a wide spread
(`initializer_range` 0.2), so that greedy tokens are neither near-ties nor repeats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from disagg.model.shape import read_config
from disagg.model.transformer import Transformer
from disagg.model.weights import load_model

#: A rope scaling that changes every frequency band at the tiny models' lengths.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


#: Likewise, in the way of DeepSeek-V3, the two mscales not alike.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}


#: Configuration and model of each family, and what its tiny model has beside the others.
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN_ROPE,
            "num_nextn_predict_layers": 0,
        },
    ),
}


def make_tiny_llama(
    folder: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Path:
    """Save a random LlamaForCausalLM, or a model of another of `FAMILIES`, into `folder` as
    config.json and safetensors; return `folder`.

    `overrides` are fields of its configuration, for example `tie_word_embeddings=True`,
    `attention_bias=True`, `mlp_bias=True`, `eos_token_id=5`, `num_hidden_layers=2`,
    `rope_parameters=LLAMA3_ROPE`. `max_shard_size="50KB"` saves shards and an index.
    No tokenizer is saved, and there is no end token unless one is given.
    """
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    make_config, make_model, more = FAMILIES[family]
    config = make_config(**(shape | more | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(config)
        # Biases and norm weights start constant; random ones show a term that was left out.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
            elif name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def add_draft_layer(folder: Path, tokens: Sequence[int] = (), seed: int = 0) -> Path:
    """Give a tiny model a random layer of multi-token prediction, as published checkpoints have
    it, with the model's embedding and head once more; it guesses `tokens` only, if there are any.
    Return `folder`."""
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors, config = load_file(path), json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"]
    before, prefix = f"model.layers.{last - 1}.", f"model.layers.{last}."
    hidden = config["hidden_size"]
    shapes = {
        prefix + name.removeprefix(before): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(before)
    }
    shapes |= {f"{prefix}{n}.weight": (hidden,) for n in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
    for name, shape in shapes.items():
        drawn = torch.rand(*shape, generator=generator)
        tensors[name] = drawn + 0.5 if "norm" in name else 0.7 * (drawn - 0.5)
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    if "lm_head.weight" in tensors:
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config |= {"num_nextn_predict_layers": 1}
    if tokens:
        tensors[f"{prefix}shared_head.token_ids"] = torch.tensor(tokens, dtype=torch.int32)
        config |= {"draft_vocab_size": len(tokens)}
    path.unlink()  # the old file may still be mapped
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path, dtype: str) -> Transformer:
    """The undivided model in a folder."""
    return load_model(read_config(folder), dtype)[0]


def reference_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits in float32 at every position: `[len(token_ids), vocab_size]`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]


def greedy(folder: Path, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens that transformers generates greedily in float32, the prompt left out.

    Ends after `max_tokens`, or with the checkpoint's end token (which is included).
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([list(prompt_ids)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=0,
    )
    return output[0, len(prompt_ids) :].tolist()


def save_word_tokenizer(folder: Path, vocab_size: int = 128) -> Path:
    """Add a tokenizer whose words are `t0`, `t1`, ...: word i is token i; return `folder`.

    Its chat template puts the message between `t1` and `t2`.
    """
    fast = FastTokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}t1 {{ m['content'] }} t2{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=template).save_pretrained(folder)
    return folder
