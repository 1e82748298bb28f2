"""The Llama and Qwen3 families: decoder layers with grouped-query attention over a paged KV cache.

    hidden -norm-> qkv -rope-> KV appended to pages, attention -o_proj-> sum -> (+) -> on_layer()
       \\________________________________________________________________________/    |
                                            next layer <- (+) <- sum <- MLP <- norm -+

`sum` adds up what the ranks have (`rank_group.py`); with one rank it changes nothing. `on_layer()`
is the tick of the layer counter: a page of this layer may leave the node right after it. So it
comes after the first sum, to which each rank adds its part when it has appended its KV. What is in
a batch and where its pages lie is known to the planned `TorchPagedAttention` alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.config import ModelConfig
from disagg.model import layers
from disagg.model.attention import TorchPagedAttention
from disagg.model.moe import MixtureOfExperts
from disagg.model.rank_group import RankGroup


class DecoderLayer:
    """This rank's share of one layer's weights; `qkv` stacks query, key and value heads."""

    def __init__(
        self, config: ModelConfig, read: layers.ReadTensor, group: RankGroup, layer: int
    ) -> None:
        prefix = f"model.layers.{layer}."
        attention, hidden, bias = f"{prefix}self_attn.", config.hidden_size, config.attention_bias
        q_rows = config.num_qo_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.input_norm = _read_norm(config, read, f"{prefix}input_layernorm")
        self.qkv = layers.read_columns(
            read, group, attention, qkv, hidden, bias, unit=config.head_dim
        )
        #: Of each head of q and of k.
        self.qk_norms = [
            layers.RMSNorm(
                read(f"{attention}{name}.weight", (config.head_dim,)), config.rms_norm_eps
            )
            for name in (("q_norm", "k_norm") if config.qk_norm else ())
        ]
        self.o_proj = layers.read_row(read, group, f"{attention}o_proj", (hidden, q_rows), bias)
        self.post_attention_norm = _read_norm(config, read, f"{prefix}post_attention_layernorm")
        read_mlp = _read_experts if layer in config.moe_layers else _read_mlp
        self.mlp = read_mlp(config, read, group, f"{prefix}mlp.")


class LlamaModel:
    """A model of these families for inference, or one rank's share of it.

    `config` is the shape of the whole model, `num_qo_heads` counts this rank's query heads. It
    keeps nothing between calls.
    """

    def __init__(self, config: ModelConfig, read: layers.ReadTensor, group: RankGroup) -> None:
        """Take the weights through `read`; ValueError if one is missing or of a wrong shape."""
        self.config = config
        self.num_qo_heads = config.num_qo_heads // group.tp
        self._group = group
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = read("model.embed_tokens.weight", vocab_shape, group.cut_vocabulary)
        self._first_token = group.rank * len(self._embedding)
        self._dtype = layers.compute_dtype(self._embedding.dtype)
        self._layers = [
            DecoderLayer(config, read, group, layer) for layer in range(config.num_layers)
        ]
        self._norm = _read_norm(config, read, "model.norm")
        head = self._embedding
        if not config.tie_word_embeddings:
            head = read("lm_head.weight", vocab_shape, group.cut_vocabulary)
        self._head = layers.Linear(head)
        self._frequencies = layers.rope_frequencies(config.head_dim, config.rope_parameters)

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
        hidden, sum_of = self._embed(token_ids), self._group.sum
        cos, sin = layers.rope_tables(positions, self._frequencies, hidden.dtype)
        heads_shape = (hidden.shape[0], -1, self.config.head_dim)
        for layer, pages in zip(self._layers, kv_pages, strict=True):
            qkv = layer.qkv(layer.input_norm(hidden)).view(heads_shape)  # [T, heads, head_dim]
            q, kv = qkv[:, : self.num_qo_heads], qkv[:, self.num_qo_heads :]
            k = kv[:, : kv.shape[1] // 2]
            for norm, part in zip(layer.qk_norms, (q, k), strict=False):
                part.copy_(norm(part))
            # Values have no position.
            layers.apply_rope(qkv[:, : q.shape[1] + k.shape[1]], cos, sin)
            attention.append(kv, pages)
            hidden = hidden + sum_of(layer.o_proj(attention.run(q, pages).flatten(1)))
            on_layer()
            hidden = hidden + sum_of(layer.mlp(layer.post_attention_norm(hidden)))
        return self._norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, float32 `[R, vocab_size]`, from forward's rows `[R, H]`."""
        joined = self._group.join(self._head(hidden).float())
        return joined[:, : self.config.vocab_size]

    def _embed(self, token_ids: Tensor) -> Tensor:
        """`[T, hidden_size]`, from whichever rank has a token's row; the others add zeros."""
        rows = token_ids - self._first_token
        is_here = (rows >= 0) & (rows < len(self._embedding))
        found = F.embedding(rows.where(is_here, 0), self._embedding).to(self._dtype)
        return self._group.sum(found.masked_fill_(~is_here[:, None], 0.0))


def _read_norm(config: ModelConfig, read: layers.ReadTensor, name: str) -> layers.RMSNorm:
    return layers.RMSNorm(read(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)


def _read_mlp(
    config: ModelConfig, read: layers.ReadTensor, group: RankGroup, prefix: str, size: int = 0
) -> layers.GatedMLP:
    """Of so many features between its maps; by default those of a layer without experts."""
    hidden, size, bias = config.hidden_size, size or config.intermediate_size, config.mlp_bias
    gate_up = {"gate_proj": size, "up_proj": size}
    return layers.GatedMLP(
        gate_up=layers.read_columns(read, group, prefix, gate_up, hidden, bias),
        down=layers.read_row(read, group, f"{prefix}down_proj", (hidden, size), bias),
    )


def _read_experts(
    config: ModelConfig, read: layers.ReadTensor, group: RankGroup, prefix: str
) -> MixtureOfExperts:
    """Whole experts: a rank has some of them, and of the others nothing but their names."""
    hidden, size = config.hidden_size, config.moe_intermediate_size
    router = read(f"{prefix}gate.weight", (config.num_experts, hidden))
    mine = group.cut(torch.arange(config.num_experts), 0).tolist()
    experts = {}
    for number in range(config.num_experts):
        expert = f"{prefix}experts.{number}."
        if number in mine:
            experts[number] = _read_mlp(config, read, RankGroup(), expert, size)
        else:
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, size) if name == "down_proj" else (size, hidden)
                read(f"{expert}{name}.weight", shape, lambda weight: weight[:0])
    return MixtureOfExperts(
        router=layers.Linear(router),
        experts=experts,
        num_chosen=config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
    )
