"""Self-attention of DeepSeek-V3 (multi-head latent attention): a token's KV is one small vector.

    x -> q_a -norm-> q_b -> q [T, heads, nope | rope]
      -> kv_a -> latent [T, kv_rank -norm- | rope] -> appended to the pages: all that is kept

    plain      a head's key:   [k_up latent | rope]   its value: v_up latent
    absorbed   q . k_up latent  =  (k_up^T q) . latent,  and the weighted sum of v_up latents is
               v_up (sum of latents): all heads attend over the latents themselves

`kv_b` holds `k_up` and `v_up` of each head. The plain form computes keys and values of all context
anew in every step, but attends in fewer dimensions. A step of few tokens takes the absorbed one.
Only the heads are shared by ranks: each of them keeps all latents.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from disagg.config import ModelConfig
from disagg.model import layers
from disagg.model.attention import TorchPagedAttention
from disagg.model.rank_group import RankGroup

#: Of the norms of latents, whatever the config says of the others.
EPS = 1e-6


class LatentAttention:
    """This rank's heads in one layer. Sizes are named as in `ModelConfig`, but `kv_rank` is
    `kv_lora_rank` (no rank of a group); `nope` and `rope` are the parts of a query or key without
    and with a position."""

    #: A mask has rows for one head: `attend_absorbed` and `attend_plain` use it for all of them.
    group_size = 1

    def __init__(
        self, config: ModelConfig, read: layers.ReadTensor, group: RankGroup, prefix: str
    ) -> None:
        hidden, bias, heads = config.hidden_size, config.attention_bias, config.num_qo_heads
        self._nope, self._rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._kv_rank, self._q_rank, v = config.kv_lora_rank, config.q_lora_rank, config.v_head_dim
        q_rows, q_name, q_in = heads * (self._nope + self._rope), "q_proj", hidden
        down = {"kv_a_proj_with_mqa": self._kv_rank + self._rope}
        if self._q_rank:
            down = {"q_a_proj": self._q_rank} | down
            q_name, q_in = "q_b_proj", self._q_rank
            self._q_norm = layers.read_norm(read, f"{prefix}q_a_layernorm", q_in, EPS)
        self._down = layers.read_columns(read, RankGroup(), prefix, down, hidden, bias)
        self._q = layers.read_columns(read, group, prefix, {q_name: q_rows}, q_in, False)
        self._kv_norm = layers.read_norm(read, f"{prefix}kv_a_layernorm", self._kv_rank, EPS)
        kv_b = read(
            f"{prefix}kv_b_proj.weight",
            (heads * (self._nope + v), self._kv_rank),
            partial(group.cut, axis=0),
        )
        # [heads, nope, kv_rank] and [heads, v_head_dim, kv_rank]
        up = kv_b.to(layers.compute_dtype(kv_b.dtype)).view(-1, self._nope + v, self._kv_rank)
        self._k_up, self._v_up = up.tensor_split((self._nope,), 1)
        self._o_proj = layers.read_row(read, group, f"{prefix}o_proj", (hidden, heads * v), bias)
        self._scale = softmax_scale(config)
        # Multiplications for each key and head with n queries. Absorbed: n (2 kv_rank + rope).
        # Plain: n (nope + rope + v), and kv_rank (nope + v) to make key and value.
        made, kv_rank = self._nope + v, self._kv_rank
        self._max_absorbed = kv_rank * made // max(1, 2 * kv_rank - made)

    def __call__(
        self, x: Tensor, rope: layers.Rope, pages: Tensor, attention: TorchPagedAttention
    ) -> Tensor:
        """Append to `pages` and attend: this rank's part `[T, hidden_size]` of a sum, from `x` of
        that shape."""
        q_latent, latent = self._down(x).tensor_split((self._q_rank,), -1)
        q = self._q(self._q_norm(q_latent) if self._q_rank else x)
        q = q.view(x.shape[0], -1, self._nope + self._rope)
        kv, k_rope = latent.tensor_split((self._kv_rank,), -1)
        latent = torch.cat((self._kv_norm(kv), k_rope), -1)
        rope(q[..., self._nope :])
        rope(latent[:, None, self._kv_rank :])
        attention.append(latent.unsqueeze(1), pages)
        return self._o_proj(attention.run(q, pages, self._attend).flatten(1))

    def _attend(self, q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """See `attention.Attend`: q `[B, qo_len, heads, nope + rope]`, kv `[1, B, 1, kv_len,
        kv_rank + rope]`, mask `[B, 1, qo_len, kv_len]` to `[B, qo_len, heads, v_head_dim]`."""
        absorbs = q.shape[1] <= self._max_absorbed
        return (self.attend_absorbed if absorbs else self.attend_plain)(q, kv[0], mask)

    def attend_plain(self, q: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
        """With keys and values of each head; latents `[B, 1, kv_len, kv_rank + rope]`."""
        latent, k_rope = latents.tensor_split((self._kv_rank,), -1)
        k_nope = latent @ self._k_up.transpose(1, 2)  # [B, heads, kv_len, nope]
        v = latent @ self._v_up.transpose(1, 2)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), -1)
        # torch's fast attention wants values as long as keys.
        padded = F.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
        output = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, padded, attn_mask=mask, scale=self._scale
        )
        return output[..., : v.shape[-1]].transpose(1, 2)

    def attend_absorbed(self, q: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
        """With the latents as the one key and value of all heads; sizes as in `attend_plain`."""
        q_nope, q_rope = q.transpose(1, 2).tensor_split((self._nope,), -1)
        # [B, heads, qo_len, kv_rank + rope]
        absorbed = torch.cat((q_nope @ self._k_up, q_rope), -1)
        if q.shape[1] == 1:  # the heads' queries become queries of one head, read in one go
            output = F.scaled_dot_product_attention(
                absorbed.transpose(1, 2), latents, latents, attn_mask=mask, scale=self._scale
            ).transpose(1, 2)
        else:
            keys = latents.expand(-1, absorbed.shape[1], -1, -1)
            output = F.scaled_dot_product_attention(
                absorbed, keys, keys, attn_mask=mask, scale=self._scale
            )
        latent = output[..., : self._kv_rank]  # [B, heads, qo_len, kv_rank]
        return torch.matmul(latent, self._v_up.transpose(1, 2)).transpose(1, 2)


def softmax_scale(config: ModelConfig) -> float:
    """What q . k is multiplied by: 1 / sqrt(its dimensions) and, if rope is scaled, the square of
    `0.1 mscale_all_dim ln(factor) + 1` (yarn, as DeepSeek has it)."""
    scale = math.sqrt(1 / (config.qk_nope_head_dim + config.qk_rope_head_dim))
    rope = config.rope_parameters
    mscale: float = rope.get("mscale_all_dim") or 0.0
    factor = 1.0 if rope["rope_type"] == "default" else rope["factor"]
    return scale * (0.1 * mscale * math.log(factor) + 1.0) ** 2
