"""The draft layer as `train_draft_layer.py` trains it, in plain torch, and its file.

joined = cat[enorm(embedded), hnorm(hidden)] -eh_proj-> decoder layer -norm-> h'

file   matrices: float8, and float32 for each row | norms: float32 | token_ids: int32
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

FLOAT8 = torch.float8_e4m3fn
#: The part of the input that is left out in training, so that texts are not learned by heart.
DROPPED = 0.1


class DraftLayer(LlamaDecoderLayer):
    """Its parameters have the names that they have in a checkpoint, behind the layer's prefix."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = nn.RMSNorm(hidden, eps)
        self.hnorm = nn.RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(hidden, eps)})
        self._rope = LlamaRotaryEmbedding(config)
        self.eval()

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """`h'` of rows whose states are `hidden` and whose next tokens' embeddings are `embedded`,
        all `[B, T, H]`; row r sees row c if `mask[r, c]`, `[T, T]`."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)
        x = self.eh_proj(F.dropout(joined, DROPPED, self.training))
        unseen = torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)[None, None]
        rope = self._rope(x, positions[None])
        x = super().forward(x, attention_mask=unseen, position_embeddings=rope)
        return self.shared_head["norm"](x)


def chain(layer: DraftLayer, embedded: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
    """`h'` of each step `[B, T, H]`. Row r of step s stands where row r of step 1 stands, but has
    the `h'` of row r - 1 of the step before in place of `h`; so its guess, of the same token, is
    number s of those that follow row r - s + 1."""
    count = embedded.shape[1]
    states, found = [hidden], []
    for step in range(1, steps + 1):
        outputs = layer(
            embedded.repeat(1, step, 1),
            torch.cat(states, 1),
            torch.arange(count).repeat(step),
            seen_by_chain(count, step),
        ).split(count, 1)
        found.append(outputs[-1])
        states.append(F.pad(outputs[-1][:, :-1], (0, 0, 1, 0)))
    return found


def seen_by_chain(count: int, steps: int) -> Tensor:
    """Which of `steps * count` rows see which: row r of step s sees the step's own row r, rows
    before that of the steps that led to it, and all of step 1 before those."""
    step, row = torch.arange(steps).repeat_interleave(count), torch.arange(count).repeat(steps)
    steps_back, rows_back = (each[:, None] - each[None, :] for each in (step, row))
    on_the_way = (steps_back >= 0) & (rows_back == steps_back)
    return on_the_way | ((step == 0) & (rows_back >= steps_back))


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and float32 `[rows]` by which each row is to be multiplied."""
    scale = weight.abs().amax(1).clamp(min=1e-12) / torch.finfo(FLOAT8).max
    return (weight / scale[:, None]).to(FLOAT8), scale


def save_layer(layer: DraftLayer, token_ids: Tensor, path: Path, made: Mapping[str, str]) -> None:
    """Write the file; `made` says how it was made."""
    tensors = {"shared_head.token_ids": token_ids}
    for name, weight in layer.state_dict().items():
        if weight.ndim == 2:
            tensors[name], tensors[f"{name}_scale"] = rounded(weight)
        else:
            tensors[name] = weight
    partial, prefix = path.with_suffix(".partial"), prefix_of(layer.config)
    named = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, partial, dict(made))
    partial.rename(path)


def load_layer(config: LlamaConfig, path: Path) -> tuple[DraftLayer, Tensor]:
    """The layer in a file, and the ids of the tokens that it guesses."""
    prefix, stored = prefix_of(config), load_file(path)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    token_ids = tensors.pop("shared_head.token_ids")
    names = [name for name, tensor in tensors.items() if tensor.dtype == FLOAT8]
    for name in names:
        tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale")[:, None]
    layer = DraftLayer(config)
    layer.load_state_dict(tensors)
    return layer, token_ids


def prefix_of(config: LlamaConfig) -> str:
    """Of the layer behind the last."""
    return f"model.layers.{config.num_hidden_layers}."
