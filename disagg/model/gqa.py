"""Self-attention of Llama and Qwen3: each KV head serves a group of query heads.

x -> qkv [T, (query heads + 2 KV heads), head_dim] -norm, rope-> K, V appended to the pages
                                                              -> q attends over them -> o_proj
"""

from torch import Tensor

from disagg.config import ModelConfig
from disagg.kv_layout import heads_of_rank
from disagg.model import layers
from disagg.model.attention import TorchPagedAttention
from disagg.model.rank_group import RankGroup


class GroupedQueryAttention:
    """This rank's heads in one layer; `qkv` stacks query, key and value heads."""

    def __init__(
        self, config: ModelConfig, read: layers.ReadTensor, group: RankGroup, prefix: str
    ) -> None:
        hidden, bias = config.hidden_size, config.attention_bias
        self._head_dim = config.head_dim
        self._num_qo_heads = config.num_qo_heads // group.tp
        num_kv_heads = len(heads_of_rank(config.num_kv_heads, group.tp, group.rank))
        #: Query heads that share a KV head.
        self.group_size = self._num_qo_heads // num_kv_heads
        q_rows = config.num_qo_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self._qkv = layers.read_columns(read, group, prefix, qkv, hidden, bias, config.head_dim)
        #: Of each head of q and of k.
        self._qk_norms = [
            layers.read_norm(read, f"{prefix}{name}", config.head_dim, config.rms_norm_eps)
            for name in (("q_norm", "k_norm") if config.qk_norm else ())
        ]
        self._o_proj = layers.read_row(read, group, f"{prefix}o_proj", (hidden, q_rows), bias)

    def __call__(
        self, x: Tensor, rope: layers.Rope, pages: Tensor, attention: TorchPagedAttention
    ) -> Tensor:
        """Append to `pages` and attend: this rank's part `[T, hidden_size]` of a sum, from `x` of
        that shape."""
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        q, kv = qkv[:, : self._num_qo_heads], qkv[:, self._num_qo_heads :]
        k = kv[:, : kv.shape[1] // 2]
        for norm, part in zip(self._qk_norms, (q, k), strict=False):
            part.copy_(norm(part))
        rope(qkv[:, : q.shape[1] + k.shape[1]])  # values have no position
        attention.append(kv, pages)
        return self._o_proj(attention.run(q, pages).flatten(1))
