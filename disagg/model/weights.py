"""The tensors of a Hugging Face checkpoint folder, and its fingerprint. Its shape is `shape.py`.

    folder | model.safetensors                     -mapped-+
           | or model.safetensors.index.json + shards -----+-> Checkpoint.read(name, shape) -> model
                                                           +-> fingerprint(config)

Files are memory mapped. A tensor that the model uses as it is stays in the mapping; one that is
converted, fused with others or laid out anew is copied, one at a time. Which share of it a rank
takes is the model's to say. A tensor that is missing or left over is refused by name.
"""

import ctypes
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from disagg.config import ModelConfig
from disagg.model.layers import Cut
from disagg.model.mtp import MTPLayer
from disagg.model.rank_group import RankGroup
from disagg.model.transformer import Transformer

logger = logging.getLogger(__name__)

#: dtypes of stored weights that `Checkpoint.read` converts.
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn

PROGRESS_AFTER_SECONDS = 1.0

#: Of each tensor, the fingerprint covers this many blocks of this many bytes, evenly spread.
SAMPLED_BLOCKS = 16
SAMPLED_BLOCK_BYTES = 4096
#: It does not cover where the model is, when to stop, what another machine calculates otherwise.
UNHASHED = {"folder", "eos_token_ids", "max_positions", "rope_frequencies", "num_draft_layers"}


def load_model(
    config: ModelConfig, dtype: str, group: RankGroup | None = None
) -> tuple[Transformer, MTPLayer | None]:
    """The model of this `config`, its weights in `dtype` ("float32" or "bfloat16"), and its draft
    layer, if that is used; for one of a `group`, its share of them.

    ValueError, one line, if the folder is incomplete, or holds what cannot be computed here.
    """
    checkpoint = Checkpoint(config, getattr(torch, dtype))
    group = group or RankGroup()
    model = Transformer(config, checkpoint.read, group, partial(_progress, group.rank))
    mtp = MTPLayer(model, checkpoint.read, group) if config.num_draft_layers else None
    checkpoint.refuse_unread(tells=group.rank == 0)
    return model, mtp


def _progress(rank: int, layers: Iterable[int]) -> Iterator[int]:
    """The layers, shown as they pass if somebody looks and it takes a while."""
    disable = True if rank else None  # None: if standard error is no terminal
    for layer in tqdm(
        layers, "loading", unit="layer", disable=disable, delay=PROGRESS_AFTER_SECONDS, leave=False
    ):
        yield layer
        # What was converted and laid out leaves holes, which glibc keeps: with two ranks half of a
        # share again.
        ctypes.CDLL(None).malloc_trim(0)


def fingerprint(config: ModelConfig) -> str:
    """32 hex digits that differ between models whose KV must not be mixed.

    Covers the config as far as it shapes what is computed, every tensor's name, shape and stored
    dtype, and a sample of its bytes (all of them up to 64 KiB). How the tensors are spread over
    files does not count. Milliseconds for a model of 270 MB.
    """
    shape = {k: v for k, v in dataclasses.asdict(config).items() if k not in UNHASHED}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for name, tensor in sorted(Checkpoint(config, torch.float32).stored.items()):
        digest.update(f"\n{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()[:32]


class Checkpoint:
    """The tensors of a folder, by name: `stored` as they lie in the mapped files, `read` in one
    dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Map the files; ValueError if one is missing or damaged."""
        self._folder = config.folder
        self._config = config
        self._dtype = dtype
        self.stored: dict[str, Tensor] = {}
        for path in _weight_files(config.folder):
            try:
                self.stored |= load_file(path)
            except (SafetensorError, FileNotFoundError) as error:
                raise ValueError(f"{path} is missing, damaged or half copied: {error}") from error
        self._unread = set(self.stored)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = lambda tensor: tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor, or a part of it, in the checkpoint's dtype (see `layers.ReadTensor`). One of
        float8 is multiplied by the scales of its blocks."""
        tensor, block = self._find(name, shape), self._config.weight_block_size
        wanted = dtype or self._dtype
        kinds = STORED_DTYPES if wanted.is_floating_point else (wanted,)
        if block is None or tensor.dtype != FLOAT8:
            if tensor.dtype not in kinds:
                raise ValueError(
                    f"{name} in {self._folder} is {tensor.dtype}; expected one of {kinds};"
                    f" {FLOAT8} needs a weight_block_size in config.json"
                )
            return cut(tensor).to(wanted)
        blocks = [-(-size // of) for size, of in zip(shape, block, strict=True)]
        part, scales = cut(tensor), self._find(f"{name}_scale_inv", tuple(blocks)).float()
        if part.numel():  # of another rank's experts there is nothing to multiply
            for axis, size in enumerate(shape):
                scales = scales.repeat_interleave(block[axis], axis).narrow(axis, 0, size)
            part = part.float() * cut(scales)
        return part.to(wanted)

    def _find(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.stored:
            raise ValueError(f"{self._folder} lacks the tensor {name}; copy the checkpoint again")
        tensor = self.stored[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} in {self._folder} does not go with config.json; expected {list(shape)},"
                f" got {list(tensor.shape)}"
            )
        self._unread.discard(name)
        return tensor

    def refuse_unread(self, *, tells: bool) -> None:
        """ValueError if a tensor was never read: the checkpoint is not quite this architecture.
        Layers behind the last are drafts and may be there; if it `tells`, that is logged."""
        config = self._config
        numbers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
        drafts = [f"model.layers.{number}." for number in numbers]
        unused = tuple(drafts[config.num_draft_layers :])
        # Each has these once more; they are the model's own.
        again = tuple(each + name for each in drafts for name in ("embed_tokens.", "shared_head.h"))
        left = sorted(name for name in self._unread if not name.startswith(unused + again))
        if tells and any(name.startswith(unused) for name in self._unread):
            said = "%s: of its num_nextn_predict_layers (%d), %d are used; see --speculate"
            logger.warning(said, self._folder, config.num_mtp_layers, config.num_draft_layers)
        for name in left:
            # Old checkpoints store the rope frequencies; tied ones may store the head as well.
            tied = config.tie_word_embeddings and name == "lm_head.weight"
            if not tied and not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(
                    f"{self._folder} has the tensor {name}, which this architecture does not use;"
                    " the model would compute something else than it was trained to"
                )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A file of the folder; ValueError, one line, if it is missing or damaged."""
    try:
        content: dict[str, Any] = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise ValueError(f"model folder {folder} does not exist or has no {name}") from None
    except ValueError as error:
        raise ValueError(f"{folder / name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / name} is not valid: expected a JSON object, got {content!r}")
    return content


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return [single]
    shards = set(read_json(folder, index.name).get("weight_map", {}).values())
    return [folder / shard for shard in sorted(shards)]


def _sample(tensor: Tensor) -> bytes:
    """All bytes of a small tensor, `SAMPLED_BLOCKS` spread blocks of a large one."""
    stored = tensor.reshape(-1).view(torch.uint8)
    if len(stored) <= SAMPLED_BLOCKS * SAMPLED_BLOCK_BYTES:
        return stored.numpy().tobytes()
    stride = (len(stored) - SAMPLED_BLOCK_BYTES) // (SAMPLED_BLOCKS - 1)
    return stored.unfold(0, SAMPLED_BLOCK_BYTES, stride).numpy().tobytes()
