"""A Hugging Face checkpoint folder: its shape, its tensors, its fingerprint.

    folder | config.json [generation_config.json]               -> ModelConfig
           | model.safetensors                     -mapped-+
           | or model.safetensors.index.json + shards -----+-> Checkpoint.read(name, shape) -> model
                                                           +-> fingerprint(folder)

Files are memory mapped. A tensor that the model uses as it is stays in the mapping; one that is
fused with others or converted is copied, one at a time. Whatever the model could only compute
wrongly (an unknown architecture, a tensor left over, quantised weights) is refused by name.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from disagg.config import ModelConfig
from disagg.model.gqa import LlamaModel
from disagg.model.rank_group import RankGroup

#: dtypes of stored weights that `Checkpoint.read` converts.
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Of each tensor, the fingerprint covers this many blocks of this many bytes, evenly spread.
SAMPLED_BLOCKS = 16
SAMPLED_BLOCK_BYTES = 4096


def load_model(folder: Path, dtype: str, group: RankGroup | None = None) -> LlamaModel:
    """The model in `folder`, its weights in `dtype` ("float32" or "bfloat16"); of a `group`, this
    rank's share of them.

    ValueError, one line, if the folder is incomplete, or holds what cannot be computed here.
    """
    config = read_config(folder)
    checkpoint = Checkpoint(folder, getattr(torch, dtype))
    model = LlamaModel(config, checkpoint.read, group or RankGroup())
    checkpoint.refuse_unread(tied=config.tie_word_embeddings)
    return model


def read_config(folder: Path) -> ModelConfig:
    """Shape of the model in `folder`, with transformers' defaults for what config.json leaves out.

    End tokens are those of generation_config.json, or of config.json where that names none.
    """
    _read_json(folder, "config.json")  # its errors are clearer
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, TypeError, KeyError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"{folder / 'config.json'} is not a valid config: {text}") from error
    _refuse_unsupported(folder, config)
    eos = config.eos_token_id
    if (folder / "generation_config.json").exists():
        eos = _read_json(folder, "generation_config.json").get("eos_token_id", eos)
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    shape = {name: getattr(config, name) for name in names if hasattr(config, name)}
    # Names that are ours alone: what a config has by them means something else, if anything.
    shape |= {
        "num_layers": config.num_hidden_layers,
        "num_qo_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "max_positions": config.max_position_embeddings,
        "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos or ()),
    }
    return ModelConfig(**shape)


def fingerprint(folder: Path) -> str:
    """32 hex digits that differ between models whose KV must not be mixed.

    Covers the config as far as it shapes what is computed, every tensor's name, shape and stored
    dtype, and a sample of its bytes (all of them up to 64 KiB). How the tensors are spread over
    files does not count. Milliseconds for a model of 270 MB.
    """
    config = dataclasses.asdict(read_config(folder))
    # These two say when to stop, not what to compute.
    del config["eos_token_ids"], config["max_positions"]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(Checkpoint(folder, torch.float32).stored.items()):
        digest.update(f"\n{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()[:32]


class Checkpoint:
    """The tensors of a folder, by name: `stored` as they lie in the mapped files, `read` in one
    dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Map the files; ValueError if one is missing or damaged."""
        self._folder = folder
        self._dtype = dtype
        self.stored: dict[str, Tensor] = {}
        for path in _weight_files(folder):
            try:
                self.stored |= load_file(path)
            except (SafetensorError, FileNotFoundError) as error:
                raise ValueError(f"{path} is missing, damaged or half copied: {error}") from error
        self._unread = set(self.stored)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in the checkpoint's dtype (see `layers.ReadTensor`)."""
        if name not in self.stored:
            raise ValueError(f"{self._folder} lacks the tensor {name}; copy the checkpoint again")
        tensor = self.stored[name]
        if tuple(tensor.shape) != shape or tensor.dtype not in STORED_DTYPES:
            raise ValueError(
                f"{name} in {self._folder} does not go with config.json; expected {list(shape)} in"
                f" one of {STORED_DTYPES}, got {list(tensor.shape)} in {tensor.dtype}"
            )
        self._unread.discard(name)
        return tensor.to(self._dtype)

    def refuse_unread(self, *, tied: bool) -> None:
        """ValueError if a tensor was never read: the checkpoint is not quite this architecture."""
        for name in sorted(self._unread):
            # Old checkpoints store the rope frequencies; tied ones may store the head as well.
            if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight"):
                raise ValueError(
                    f"{self._folder} has the tensor {name}, which this architecture does not use;"
                    " the model would compute something else than it was trained to"
                )


def _refuse_unsupported(folder: Path, config: PreTrainedConfig) -> None:
    """ValueError if the config asks for something that would silently be left out."""
    supported: dict[str, tuple[object, ...]] = {
        "architectures": (["LlamaForCausalLM"],),
        "model_type": ("llama",),
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


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise ValueError(f"model folder {folder} does not exist or has no {name}") from None
    except ValueError as error:
        raise ValueError(f"{folder / name} is not valid JSON: {error}") from error
    return content


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return [single]
    shards = set(_read_json(folder, index.name)["weight_map"].values())
    return [folder / shard for shard in sorted(shards)]


def _sample(tensor: Tensor) -> bytes:
    """All bytes of a small tensor, `SAMPLED_BLOCKS` spread blocks of a large one."""
    stored = tensor.reshape(-1).view(torch.uint8)
    if len(stored) <= SAMPLED_BLOCKS * SAMPLED_BLOCK_BYTES:
        return stored.numpy().tobytes()
    stride = (len(stored) - SAMPLED_BLOCK_BYTES) // (SAMPLED_BLOCKS - 1)
    return stored.unfold(0, SAMPLED_BLOCK_BYTES, stride).numpy().tobytes()
