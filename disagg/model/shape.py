"""The shape of a Hugging Face checkpoint: from config.json, with transformers' defaults.

    folder | config.json [generation_config.json] -> ModelConfig

Whatever the model could only compute wrongly (an unknown architecture, quantised weights) is
refused by name. Tensors are `weights.py`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from disagg.config import ModelConfig
from disagg.model.weights import read_json

#: What is computed here, as config.json has it under "model_type" and under "architectures".
MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")
ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def read_config(folder: Path) -> ModelConfig:
    """Shape of the model in `folder`, with transformers' defaults for what config.json leaves out.

    End tokens are those of generation_config.json, or of config.json where that names none.
    ValueError, one line, if a file is missing or damaged, or the model is not supported.
    """
    read_json(folder, "config.json")  # its errors are clearer
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, TypeError, KeyError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"{folder / 'config.json'} is not a valid config: {text}") from error
    _refuse_unsupported(folder, config)
    eos = config.eos_token_id
    if (folder / "generation_config.json").exists():
        eos = read_json(folder, "generation_config.json").get("eos_token_id", eos)
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    shape = {name: getattr(config, name) for name in names if hasattr(config, name)}
    # Names that are ours alone: if a config has one of them too, it means something else there.
    shape |= {
        "num_layers": config.num_hidden_layers,
        "num_qo_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "max_positions": config.max_position_embeddings,
        "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos or ()),
        "qk_norm": config.model_type != "llama",
        "moe_layers": tuple(_moe_layers(config)),
    }
    return ModelConfig(**shape)


def _moe_layers(config: PreTrainedConfig) -> Iterator[int]:
    if config.model_type == "qwen3_moe":
        for layer in range(config.num_hidden_layers):
            is_dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
            if not is_dense and config.num_experts:
                yield layer


def _refuse_unsupported(folder: Path, config: PreTrainedConfig) -> None:
    """ValueError if the config asks for something that would silently be left out."""
    supported: dict[str, tuple[object, ...]] = {
        "architectures": tuple([name] for name in ARCHITECTURES),
        "model_type": MODEL_TYPES,
        "hidden_act": ("silu",),
        "quantization_config": (None,),
        "sliding_window": (None,),
        "rope_type": ("default", "llama3"),
        "partial_rotary_factor": (None, 1.0),
    }
    asked = vars(config) | {"model_type": config.model_type} | (config.rope_parameters or {})
    for name, values in supported.items():
        if asked.get(name) not in values:
            raise ValueError(
                f"{folder}: {name} {asked.get(name)!r} is not supported; expected"
                f" {' or '.join(map(repr, values))}"
            )
    if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
        raise ValueError(
            f"{folder}: num_attention_heads ({config.num_attention_heads}) must be a multiple of"
            f" num_key_value_heads ({config.num_key_value_heads}) and head_dim"
            f" ({config.head_dim}) even"
        )
