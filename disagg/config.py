"""What is fixed when a node starts: the model's shape, cache, limits of a step, clocks, NICs.

Pure data. Reading and checking a checkpoint's `config.json` is `model/shape.py`, command lines
`serve/options.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from disagg.kv_layout import PageOrder

#: Bytes per element of the dtypes that weights and KV pages may have.
ITEMSIZE = {"float32": 4, "bfloat16": 2}

#: The most tokens that are guessed at a time.
MAX_DRAFTS = 8
#: What the engine does with a request whose remote prefill failed.
OnFailure = Literal["local", "retry", "fail"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer; names that Hugging Face configs have mean the same.

    `max_positions` is the longest sequence (prompt and output, tokens) the model may see.
    `rope_frequencies` are the radians per position of each pair of a head's elements, and
    `rope_factor` is what sines and cosines are multiplied by. `qk_norm` says whether each head's q
    and k are normalized; `moe_layers` have experts in place of one MLP; `router_bias` says that
    they are chosen with a bias, from groups.

    `num_kv_vectors` are those of a KV head for a token: K and V. With MLA, where `kv_lora_rank` is
    above 0, a token has one KV head and one vector: `head_dim = kv_lora_rank + qk_rope_head_dim`.

    Of the `num_mtp_layers` that the checkpoint has, `num_draft_layers` (0 or 1) are used; they
    guess `draft_vocab_size` tokens, 0 for all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_kv_vectors: int = 2
    max_positions: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    rope_frequencies: tuple[float, ...]
    rope_factor: float = 1.0
    rope_interleave: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    qk_norm: bool = False
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    router_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_mtp_layers: int = 0
    num_draft_layers: int = 0
    folder: Path = field(default=Path(), compare=False)
    draft_vocab_size: int = 0
    weight_block_size: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of one node, and the tail slots beside it (`kv_layout.tail_slot`). Of
    several ranks, each has its heads' part of every page.

    `dtype` is one of `ITEMSIZE`; the numbers are at least 1.
    """

    num_pages: int
    page_size: int = 16
    kv_layout: PageOrder = PageOrder.HND
    dtype: str = "bfloat16"
    num_tail_slots: int = 64


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step: tokens in all (decodes and chunks together) and sequences at once.

    Both are at least 1. `speculate` (up to `MAX_DRAFTS`) is how many tokens are guessed at a time.
    """

    max_batch_tokens: int = 512
    max_batch_size: int = 256
    speculate: int = 0


@dataclass(frozen=True, kw_only=True)
class MessengerConfig:
    """The clocks of the hand-over, in seconds above 0, and what becomes of an attempt that fails.

    Silence and age are different things (a peer that beats may still have a long queue):
    `peer_timeout` bounds how long a peer may say nothing at all, `request_timeout` how long one
    attempt may take from its PrefillRequest to its last write. `on_failure` says what becomes of a
    request whose attempt failed: computed on the decoder ("local"), tried again elsewhere
    ("retry"), or ended ("fail").
    """

    peer_timeout: float = 5.0
    request_timeout: float = 120.0
    reconnect_interval: float = 0.25
    max_open_attempts: int = 1024
    on_failure: OnFailure = "local"

    def __post_init__(self) -> None:
        for name in ("peer_timeout", "request_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")

    @property
    def heartbeat_interval(self) -> float:
        """Often enough that a peer must miss several beats before it counts as dead."""
        return min(0.5, self.peer_timeout / 4)


@dataclass(frozen=True, kw_only=True)
class RdmaFlags:
    """Named as the flags; each takes the place of a choice. A NIC is a device and its port, as in
    "mlx5_0,mlx5_1:2"; without a port, all of them that are active. A map gives each memory its own,
    as in "cuda:0=mlx5_0,mlx5_1;cuda:1=mlx5_2"."""

    rdma_device: str | None = None
    gid_index: int | None = None
    nic_map: str | None = None
    poll_cpu: int | None = None
