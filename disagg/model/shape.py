"""The shape of a Hugging Face checkpoint: from config.json, with transformers' defaults.

    folder | config.json [generation_config.json] -> ModelConfig

Whatever the model could only compute wrongly (an unknown architecture, rope scaling or
quantisation) is refused by name. Tensors are `weights.py`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from disagg.config import ModelConfig
from disagg.model.weights import read_json

#: What is computed here, as config.json has it under "model_type" and under "architectures".
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
#: What is counted or divided by: from 1 on, where config.json has it.
COUNTS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
    *("n_group", "decoder_sparse_step", "rope_theta", "factor"),
)


def read_config(folder: Path) -> ModelConfig:
    """Shape of the model in `folder`, with transformers' defaults for what config.json leaves out.

    End tokens are those of generation_config.json, or of config.json where that names none.
    ValueError, one line, if a file is missing or damaged, or the model is not supported.
    """
    read_json(folder, "config.json")  # its errors are clearer
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        num_mtp_layers = max(0, int(getattr(config, "num_nextn_predict_layers", None) or 0))
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{folder / 'config.json'} is not a valid config: {text}") from error
    _refuse_unsupported(folder, config)
    is_latent = config.model_type == "deepseek_v3"
    head_dim = config.qk_rope_head_dim if is_latent else getattr(config, "head_dim", None)
    # The elements that rope turns: transformers' functions for that look here.
    config.head_dim = head_dim or config.hidden_size // config.num_attention_heads
    _refuse_heads(folder, config)
    frequencies, factor = _rope(config)
    layers = range(config.num_hidden_layers + num_mtp_layers)
    eos = config.eos_token_id
    if (folder / "generation_config.json").exists():
        eos = read_json(folder, "generation_config.json").get("eos_token_id", eos)
    ours, theirs = ({f.name for f in dataclasses.fields(each)} for each in (ModelConfig, config))
    # A field that this family does not have means nothing. What is null there is "none" here.
    shape = {n: value for n in ours & theirs if (value := getattr(config, n)) is not None}
    # Names that are ours alone: if a config has one of them too, it means something else there.
    shape |= {
        "folder": folder.absolute(),
        "num_layers": config.num_hidden_layers,
        "num_qo_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_positions": config.max_position_embeddings,
        "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos or ()),
        "rope_frequencies": frequencies,
        "rope_factor": factor,
        "qk_norm": config.model_type in ("qwen3", "qwen3_moe"),
        "moe_layers": tuple(n for n in layers if _has_experts(config, n)),
        "num_mtp_layers": num_mtp_layers,
        "draft_vocab_size": getattr(config, "draft_vocab_size", None) or 0,
    }
    if is_latent:
        shape |= {
            "num_kv_heads": 1,
            "num_kv_vectors": 1,
            "head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
            "num_experts": config.n_routed_experts,
            "router_bias": True,
        }
    if block := _quantization(config).get("weight_block_size"):
        if not isinstance(block, list) or len(block) != 2 or min(block) < 1:
            raise ValueError(f"{folder}: weight_block_size {block!r} is not two numbers from 1 on")
        shape["weight_block_size"] = tuple(block)
    model = ModelConfig(**shape)
    _refuse_impossible(folder, model)
    return model


def _has_experts(config: PreTrainedConfig, layer: int) -> bool:
    if config.model_type == "deepseek_v3":  # draft layers always have them
        return bool(layer >= min(config.first_k_dense_replace or 0, config.num_hidden_layers))
    if config.model_type == "qwen3_moe" and config.num_experts:
        return layer not in config.mlp_only_layers and not (layer + 1) % config.decoder_sparse_step
    return False


def _rope(config: PreTrainedConfig) -> tuple[tuple[float, ...], float]:
    """Radians per position of each pair of elements that is turned, and the factor of sines."""
    rope, dim = config.rope_parameters, config.head_dim
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / rope["rope_theta"] ** exponents).tolist()), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), factor


def _quantization(config: PreTrainedConfig) -> dict[str, Any]:
    return getattr(config, "quantization_config", None) or {}


def _refuse_unsupported(folder: Path, config: PreTrainedConfig) -> None:
    """ValueError if the config asks for something that would silently be left out."""
    supported: dict[str, tuple[object, ...]] = {
        "architectures": tuple([name] for name in FAMILIES.values()),
        "model_type": tuple(FAMILIES),
        "hidden_act": ("silu",),
        "sliding_window": (None,),
        "rope_type": ("default", "linear", "llama3", "yarn"),
        "partial_rotary_factor": (None, 1.0),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "quant_method": (None, "fp8"),
        "fmt": (None, "e4m3"),
        "layer_types": ([], ["full_attention"]),
    }
    asked = vars(config) | {"model_type": config.model_type} | (config.rope_parameters or {})
    asked |= _quantization(config)
    asked["layer_types"] = sorted({*(asked.get("layer_types") or ())})
    for name, values in supported.items():
        if asked.get(name) not in values:
            raise ValueError(
                f"{folder}: {name} {asked.get(name)!r} is not supported; expected"
                f" {' or '.join(map(repr, values))}"
            )
    for name in COUNTS:
        number = asked.get(name, 1)
        if not isinstance(number, int | float) or number < 1:
            raise ValueError(f"{folder}: {name} is {number!r}; expected a number from 1 on")


def _refuse_heads(folder: Path, config: PreTrainedConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
        raise ValueError(
            f"{folder}: num_attention_heads ({config.num_attention_heads}) must be a multiple of"
            f" num_key_value_heads ({config.num_key_value_heads}) and head_dim"
            f" ({config.head_dim}) even"
        )


def _refuse_impossible(folder: Path, model: ModelConfig) -> None:
    """ValueError if a token cannot be given as many experts as it should have."""
    in_group, rest = divmod(model.num_experts, model.n_group)
    enough = model.num_experts_per_tok <= model.topk_group * in_group
    fits = enough and not rest and model.topk_group <= model.n_group
    if not fits or (model.router_bias and in_group < 2):
        raise ValueError(
            f"{folder}: num_experts_per_tok ({model.num_experts_per_tok}) of {model.num_experts}"
            f" experts cannot be chosen from topk_group ({model.topk_group}) of n_group"
            f" ({model.n_group}) equal groups of at least 2"
        )
