"""The Llama family: decoder layers with grouped-query attention over a paged KV cache.

    hidden --norm--> qkv --rope--> KV appended to pages, attention --o_proj--> (+) --> on_layer()
       \\______________________________________________________________________/ |
                                             next layer <-- (+) <-- MLP <-- norm -+

`on_layer()` is the tick of the layer counter: a page of this layer may leave the node right after
it, so it comes after the KV append and (for the sake of tensor parallelism, where that step is an
all-reduce) after the attention output projection. What is in a batch and where its pages lie is
known to the planned `TorchPagedAttention` alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.config import ModelConfig
from disagg.model import layers
from disagg.model.attention import TorchPagedAttention


class DecoderLayer:
    """One layer's parts; `qkv` stacks query, key and value heads."""

    def __init__(self, config: ModelConfig, read: layers.ReadTensor, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, intermediate = config.hidden_size, config.intermediate_size
        q_rows = config.num_qo_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up = {"gate_proj": intermediate, "up_proj": intermediate}
        bias, mlp_bias = config.attention_bias, config.mlp_bias
        self.input_norm = _read_norm(config, read, f"{prefix}input_layernorm")
        self.qkv = layers.read_linear(read, attention, qkv, hidden, bias)
        self.o_proj = layers.read_linear(read, attention, {"o_proj": hidden}, q_rows, bias)
        self.post_attention_norm = _read_norm(config, read, f"{prefix}post_attention_layernorm")
        self.mlp = layers.GatedMLP(
            gate_up=layers.read_linear(read, mlp, gate_up, hidden, mlp_bias),
            down=layers.read_linear(read, mlp, {"down_proj": hidden}, intermediate, mlp_bias),
        )


class LlamaModel:
    """A LlamaForCausalLM for inference. `config` is its shape; it keeps nothing between calls."""

    def __init__(self, config: ModelConfig, read: layers.ReadTensor) -> None:
        """Take the weights through `read`; ValueError if one is missing or of a wrong shape."""
        self.config = config
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = read("model.embed_tokens.weight", vocab_shape)
        self._dtype = layers.compute_dtype(self._embedding.dtype)
        self._layers = [DecoderLayer(config, read, layer) for layer in range(config.num_layers)]
        self._norm = _read_norm(config, read, "model.norm")
        head = self._embedding
        if not config.tie_word_embeddings:
            head = read("lm_head.weight", vocab_shape)
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
        `kv_pages` holds one tensor per layer, `[num_pages, *page_shape]`; the new tokens' KV is
        written into it. `attention` has been planned for this step. `on_layer()` is called once
        per layer, as the module's picture shows.
        """
        hidden = F.embedding(token_ids, self._embedding).to(self._dtype)  # [T, hidden_size]
        cos, sin = layers.rope_tables(positions, self._frequencies, hidden.dtype)
        num_qo_heads, num_kv_heads = self.config.num_qo_heads, self.config.num_kv_heads
        heads_shape = (hidden.shape[0], -1, self.config.head_dim)
        for layer, pages in zip(self._layers, kv_pages, strict=True):
            qkv = layer.qkv(layer.input_norm(hidden)).view(heads_shape)  # [T, all heads, head_dim]
            layers.apply_rope(qkv[:, :-num_kv_heads], cos, sin)
            attention.append(qkv[:, num_qo_heads:], pages)
            attended = attention.run(qkv[:, :num_qo_heads], pages)
            hidden = hidden + layer.o_proj(attended.flatten(1))
            on_layer()
            hidden = hidden + layer.mlp(layer.post_attention_norm(hidden))
        return self._norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, float32 `[R, vocab_size]`, from forward's rows `[R, H]`."""
        return self._head(hidden).float()


def _read_norm(config: ModelConfig, read: layers.ReadTensor, name: str) -> layers.RMSNorm:
    return layers.RMSNorm(read(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)
