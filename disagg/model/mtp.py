"""Multi-token prediction of DeepSeek-V3: one more layer that guesses the token after the next.

    model   t_i ----> h_i (after the final norm) ----> t_{i+1}
    draft   [enorm(embedding of t_{i+1}) | hnorm(h_i)] -eh_proj-> decoder layer -norm-> h'_i
            head(h'_i) guesses t_{i+2};  h'_i and that guess in place of h and t guess the next

Row i needs token i + 1, so its KV, which has pages like any layer's, is one token behind. Embedding
and head are the model's. (Section 2.2 of the DeepSeek-V3 report.) A checkpoint may have a smaller
draft vocabulary: what it reads and multiplies for a guess is mostly the head.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from disagg.model import layers
from disagg.model.attention import TorchPagedAttention
from disagg.model.rank_group import RankGroup
from disagg.model.transformer import DecoderLayer, Transformer


class MTPLayer(DecoderLayer):
    """This rank's share of the layer that stands behind the last of `model`."""

    def __init__(self, model: Transformer, read: layers.ReadTensor, group: RankGroup) -> None:
        config = model.config
        super().__init__(config, read, group, config.num_layers)
        self._model, self._head, self.tokens = model, model.head, model.tokens
        prefix, hidden = f"model.layers.{config.num_layers}.", config.hidden_size
        self._enorm, self._hnorm, self._norm = (
            layers.read_norm(read, f"{prefix}{name}", hidden, config.rms_norm_eps)
            for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self._eh_proj = layers.Linear(read(f"{prefix}eh_proj.weight", (hidden, 2 * hidden)))
        if size := config.draft_vocab_size:
            tokens = read(f"{prefix}shared_head.token_ids", (size,), dtype=torch.int32)
            self.tokens = tokens.tolist()
            if not set(self.tokens) <= set(model.tokens):
                raise ValueError(f"{config.folder}: a draft token is not in {model.tokens}")
            shape = (config.vocab_size, hidden)
            rows = read(model.head_name, shape, lambda head: group.cut_vocabulary(head[tokens]))
            self._head = layers.Linear(rows)

    @torch.inference_mode()
    def draft(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        positions: Tensor,
        kv_pages: Sequence[Tensor],
        attention: TorchPagedAttention,
        on_layer: Callable[[], None],
    ) -> Tensor:
        """`h'` from `h`, both `[T, hidden_size]`, and the tokens that follow each row, `[T]`; all
        else as in `Transformer.forward`."""
        joined = torch.cat((self._enorm(self._model.embed(next_ids)), self._hnorm(hidden)), -1)
        rope, (pages,) = self._model.rope(positions), kv_pages
        return self._norm(self(self._eh_proj(joined), rope, pages, attention, on_layer))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of each of the `tokens`, float32, from rows of `h'` `[R, hidden_size]`."""
        return self.group.join(self._head(hidden).float())[:, : len(self.tokens)]
