"""Experts against the definition: token by token, each chosen expert by itself."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.model.layers import Linear
from disagg.model.moe import ExpertLinear, MixtureOfExperts, Router
from disagg.model.rank_group import check_shares
from disagg.model.shape import read_config
from tests.tiny_models import loaded, make_tiny_llama

HIDDEN, NUM_EXPERTS, NUM_CHOSEN = 16, 5, 2
#: Only rows of whole 16 bytes are mapped for all experts at once.
SIZES = (6, 8)


class Weights:
    def __init__(self, size: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            # Maps numbers around 1 to such: larger ones would be rounded by more than is allowed.
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.router = draw(NUM_EXPERTS, HIDDEN)
        self.gate_up = draw(NUM_EXPERTS, 2 * size, HIDDEN)
        self.down = draw(NUM_EXPERTS, HIDDEN, size)

    def mixture(self, numbers: range, normalize: bool) -> MixtureOfExperts:
        gate_up, down = (
            ExpertLinear([whole[n] for n in numbers]) for whole in (self.gate_up, self.down)
        )
        router = Router(scores=Linear(self.router), num_chosen=NUM_CHOSEN, normalize=normalize)
        return MixtureOfExperts(router=router, gate_up=gate_up, down=down, mine=numbers)

    def one(self, x: torch.Tensor, normalize: bool) -> torch.Tensor:
        """Of one token."""
        probabilities = (self.router @ x).softmax(0)
        chosen = probabilities.argsort(descending=True)[:NUM_CHOSEN].tolist()
        total = sum(probabilities[n] for n in chosen) if normalize else 1.0
        output = torch.zeros(HIDDEN)
        for n in chosen:
            gate, up = (self.gate_up[n] @ x).chunk(2)
            output += probabilities[n] / total * (self.down[n] @ (gate.sigmoid() * gate * up))
        return output


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("size", SIZES)
def test_each_token_goes_through_its_experts(size, num_tokens, normalize):
    weights = Weights(size)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(num_tokens))
    expected = torch.stack([weights.one(row, normalize) for row in x])
    whole = weights.mixture(range(NUM_EXPERTS), normalize)
    torch.testing.assert_close(whole(x), expected)
    parts = [weights.mixture(part, normalize)(x) for part in (range(2), range(2, NUM_EXPERTS))]
    torch.testing.assert_close(sum(parts), expected)


def test_a_rank_without_a_chosen_expert_adds_nothing():
    nobody = Weights().mixture(range(0), normalize=True)
    assert not nobody(torch.randn(3, HIDDEN)).any()


def test_which_layers_have_experts(tmp_path):
    options = {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    folder = make_tiny_llama(tmp_path, family="qwen3_moe", **options)
    assert read_config(folder).moe_layers == (1, 5)
    loaded(folder, "float32")


@pytest.mark.parametrize("surplus", [False, True])
def test_missing_and_surplus_experts_are_refused_by_name(tmp_path, surplus):
    folder = make_tiny_llama(tmp_path, family="qwen3_moe")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.{}.up_proj.weight"
    if surplus:
        tensors[name.format(8)] = tensors[name.format(7)].clone()
    else:
        del tensors[name.format(7)]
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name.format(8 if surplus else 7)):
        loaded(folder, "float32")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_router_computes_in_float32_whatever_the_model(tmp_path, family):
    folder = make_tiny_llama(tmp_path, family=family)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, chosen = loaded(folder, "bfloat16")._layers[2].mlp.router(x)
    expected_weights, expected = loaded(folder, "float32")._layers[2].mlp.router(x)
    assert weights.dtype == torch.float32
    assert weights.equal(expected_weights) and chosen.equal(expected)


def test_a_bias_is_not_rounded(tmp_path):
    folder = make_tiny_llama(tmp_path, family="deepseek_v3")
    bias = load_file(folder / "model.safetensors")[
        "model.layers.2.mlp.gate.e_score_correction_bias"
    ]
    assert loaded(folder, "bfloat16")._layers[2].mlp.router.bias.equal(bias)


def test_the_router_with_a_bias_chooses_from_the_best_groups():
    """Four groups of four; many sums of score and bias are below 0."""
    generator = torch.Generator().manual_seed(0)
    rows, bias = (torch.randn(*size, generator=generator) for size in ((16, HIDDEN), (16,)))
    groups = {"num_groups": 4, "num_groups_chosen": 2}
    router = Router(
        scores=Linear(rows), num_chosen=5, normalize=True, bias=2 * bias - 1, factor=2.5, **groups
    )
    x = torch.randn(40, HIDDEN, generator=generator)
    for token, weights, chosen in zip(x, *router(x), strict=True):
        scores = (rows @ token).sigmoid().tolist()
        sums = [score + 2 * float(b) - 1 for score, b in zip(scores, bias, strict=True)]
        best = sorted(range(4), key=lambda g: -sum(sorted(sums[4 * g : 4 * g + 4])[-2:]))[:2]
        experts = sorted((4 * g + n for g in best for n in range(4)), key=lambda n: -sums[n])[:5]
        assert chosen.tolist() == experts
        total = sum(scores[n] for n in experts)
        assert weights.tolist() == pytest.approx(
            [2.5 * scores[n] / total for n in experts], abs=1e-6
        )


def test_ranks_share_whole_experts(tmp_path):
    folder = make_tiny_llama(tmp_path, family="qwen3_moe", num_experts=7)
    with pytest.raises(ValueError, match="num_experts 7 of the model cannot be shared by 2 ranks"):
        check_shares(read_config(folder), 2)


def test_ranks_share_the_shared_experts(tmp_path):
    folder = make_tiny_llama(tmp_path, family="deepseek_v3", moe_intermediate_size=15)
    with pytest.raises(ValueError, match=r"n_shared_experts \* moe_intermediate_size 15 of the"):
        check_shares(read_config(folder), 2)
