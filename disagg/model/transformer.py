"""The model: embedding, decoder layers over a paged KV cache, head. All families share it.

    hidden -norm-> self-attention -> sum -> (+) -> on_layer()
       \\____________________________________/ |
                        next layer <- (+) <- sum <- MLP or experts <- norm

Self-attention is `gqa.py` (Llama, Qwen3) or `mla.py` (DeepSeek-V3); experts are `moe.py`.

`sum` adds up what the ranks have (`rank_group.py`); with one rank it changes nothing. `on_layer()`
is the tick of the layer counter: a page of this layer may leave the node right after it. So it
comes after the first sum, to which each rank adds its part when it has appended its KV. What is in
a batch and where its pages lie is known to the planned `TorchPagedAttention` alone.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.config import ModelConfig
from disagg.model import layers
from disagg.model.attention import TorchPagedAttention
from disagg.model.gqa import GroupedQueryAttention
from disagg.model.mla import LatentAttention
from disagg.model.moe import read_experts
from disagg.model.rank_group import RankGroup


class DecoderLayer:
    """This rank's share of one layer's weights."""

    def __init__(
        self, config: ModelConfig, read: layers.ReadTensor, group: RankGroup, layer: int
    ) -> None:
        self.group = group
        prefix, hidden, eps = f"model.layers.{layer}.", config.hidden_size, config.rms_norm_eps
        self.input_norm = layers.read_norm(read, f"{prefix}input_layernorm", hidden, eps)
        make = LatentAttention if config.kv_lora_rank else GroupedQueryAttention
        self.self_attn = make(config, read, group, f"{prefix}self_attn.")
        name = f"{prefix}post_attention_layernorm"
        self.post_attention_norm = layers.read_norm(read, name, hidden, eps)
        self.mlp = (
            read_experts(config, read, group, f"{prefix}mlp.")
            if layer in config.moe_layers
            else layers.read_mlp(
                read, group, f"{prefix}mlp.", hidden, config.intermediate_size, config.mlp_bias
            )
        )

    def __call__(
        self,
        hidden: Tensor,
        rope: layers.Rope,
        pages: Tensor,
        attention: TorchPagedAttention,
        on_layer: Callable[[], None],
    ) -> Tensor:
        """Map `[T, hidden_size]` to the same shape; the tokens' KV is appended to `pages`."""
        attended = self.self_attn(self.input_norm(hidden), rope, pages, attention)
        hidden = hidden + self.group.sum(attended)
        on_layer()
        return hidden + self.group.sum(self.mlp(self.post_attention_norm(hidden)))


class Transformer:
    """A model of any family for inference, or one rank's share of it.

    `config` is the shape of the whole model, `group_size` what a `TorchPagedAttention` for this
    share of it needs. It keeps nothing between calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: layers.ReadTensor,
        group: RankGroup,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Take the weights through `read`, layer by layer in the order of `progress(numbers)`;
        ValueError if one is missing or of a wrong shape."""
        self.config = config
        self.tokens: Sequence[int] = range(config.vocab_size)
        self.group = group
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = read("model.embed_tokens.weight", vocab_shape, group.cut_vocabulary)
        self._first_token = group.rank * len(self._embedding)
        self._dtype = layers.compute_dtype(self._embedding.dtype)
        self._layers = [
            DecoderLayer(config, read, group, layer) for layer in progress(range(config.num_layers))
        ]
        self.group_size = self._layers[0].self_attn.group_size
        self._norm = layers.read_norm(read, "model.norm", config.hidden_size, config.rms_norm_eps)
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head_name = f"{name}.weight"
        self.head = layers.Linear(read(self.head_name, vocab_shape, group.cut_vocabulary))
        self._frequencies = torch.tensor(config.rope_frequencies)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_pages: Sequence[Tensor],
        attention: TorchPagedAttention,
        on_layer: Callable[[], None],
    ) -> Tensor:
        """Run one step; return hidden states after the final norm: `[T, hidden_size]`.

        `token_ids` and `positions` are int64 `[T]`, the batch's requests one after another.
        `kv_pages` holds one tensor per layer, `[num_pages, *page_shape]`, of this rank's heads; the
        new tokens' KV is written into it. `attention` has been planned for this step. `on_layer()`
        is called once per layer, as the module's picture shows.
        """
        hidden, rope = self.embed(token_ids), self.rope(positions)
        for layer, pages in zip(self._layers, kv_pages, strict=True):
            hidden = layer(hidden, rope, pages, attention, on_layer)
        return self._norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, float32 `[R, vocab_size]`, from forward's rows `[R, H]`."""
        joined = self.group.join(self.head(hidden).float())
        return joined[:, : self.config.vocab_size]

    def rope(self, positions: Tensor) -> layers.Rope:
        """Turns queries and keys of the tokens at `positions`, int64 `[T]`."""
        angles = torch.outer(positions.float(), self._frequencies)  # [T, rotary dim / 2]
        factor, interleaved = self.config.rope_factor, self.config.rope_interleave
        return layers.Rope(angles, factor, interleaved, self._dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[T, hidden_size]`, from whichever rank has a token's row; the others add zeros."""
        rows = token_ids - self._first_token
        is_here = (rows >= 0) & (rows < len(self._embedding))
        found = F.embedding(rows.where(is_here, 0), self._embedding).to(self._dtype)
        return self.group.sum(found.masked_fill_(~is_here[:, None], 0.0))
