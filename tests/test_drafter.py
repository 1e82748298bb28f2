"""Speculation: the same tokens as without, the same guesses kept split and undivided."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from disagg.config import CacheConfig
from disagg.engine import runner
from disagg.engine.drafter import Drafter
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.runner import Runner
from disagg.hooks import Span
from disagg.kv_layout import PageOrder
from disagg.model.shape import read_config
from disagg.request import FinishReason, SamplingParams
from tests.test_engine import Messenger, P, Replica
from tests.tiny_models import add_draft_layer, greedy, make_tiny_llama

#: So few that a guess is often right by chance.
VOCABULARY = 6
LENGTHS = range(1, 4 * P + 3)
MAX_TOKENS = 9


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((5 * i * i + 3 * i + length) % VOCABULARY for i in range(length))


@pytest.fixture(scope="module", params=["deepseek_v3", "llama", "draft_model"])
def models(request, tmp_path_factory):
    """MLA with experts; K and V of heads, and a draft vocabulary that lacks some tokens; a draft
    model of another family and shape."""
    family = request.param
    main = tmp_path_factory.mktemp("model")
    if family == "draft_model":
        make_tiny_llama(main, vocab_size=VOCABULARY)
        shape = {"num_hidden_layers": 2, "num_key_value_heads": 1, "hidden_size": 32, "seed": 3}
        other = tmp_path_factory.mktemp("draft")
        make_tiny_llama(other, family="qwen3", vocab_size=VOCABULARY, **shape)
        return [read_config(main), read_config(other)]
    make_tiny_llama(main, family=family, vocab_size=VOCABULARY)
    add_draft_layer(main, tokens=[5, 0, 2, 3] if family == "llama" else [])
    return [replace(read_config(main), num_draft_layers=1)]


@pytest.fixture(scope="module")
def oracle(models):
    folder = models[0].folder
    return {prompt_of(n): greedy(folder, prompt_of(n), MAX_TOKENS) for n in LENGTHS}


def make_runner(models, cache: CacheConfig) -> Runner:
    return runner.make_runner(KVCache(cache, models), LayerCounter())


class Watched:
    """Notes how many guesses were made and kept in each step of each prompt."""

    def __init__(self, replica: Replica) -> None:
        self.steps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        after_span = replica.engine._after_span

        def note(sequence, span, result, now):
            if result.tokens:
                prompt = tuple(sequence.tokens[: sequence.num_prompt_tokens])
                kept = len(result.tokens) - 1
                self.steps.setdefault(prompt, []).append((result.num_drafts, kept))
            return after_span(sequence, span, result, now)

        replica.engine._after_span = note


def undivided(models, num_drafts: int, budget: int = 512, **same) -> Replica:
    return Replica(
        make_runner=partial(make_runner, models),
        max_batch_tokens=budget,
        speculate=num_drafts,
        num_pages=200,
        **same,
    )


def divided(models, num_drafts: int, budget: int = 512, **same) -> Messenger:
    return Messenger(
        make_runner=partial(make_runner, models),
        budget=budget,
        speculate=num_drafts,
        num_pages=200,
        **same,
    )


def answers(replica: Replica, runs, prompts, max_tokens=MAX_TOKENS, **sampling):
    numbers = [replica.submit(prompt, max_tokens, **sampling) for prompt in prompts]
    runs.run()
    return {p: replica.tokens[n] for p, n in zip(prompts, numbers, strict=True)}


@pytest.fixture(scope="module")
def kept_undivided(models, oracle):
    """Of each number of drafts: guesses made and kept by step of each prompt, each prompt alone."""
    found = {}
    for num_drafts in (1, 2, 3):
        replica = undivided(models, num_drafts)
        watched = Watched(replica)
        for prompt in oracle:
            assert answers(replica, replica, [prompt]) == {prompt: oracle[prompt]}
        found[num_drafts] = watched.steps
    return found


def test_some_guesses_are_right_and_some_wrong(kept_undivided):
    for num_drafts, by_prompt in kept_undivided.items():
        steps = list(itertools.chain(*by_prompt.values()))
        assert {kept for _, kept in steps} >= {0, 1}
        assert max(made for made, _ in steps) == num_drafts


@pytest.mark.parametrize("budget", [1, P - 1, P, 2 * P + 1, 512])
@pytest.mark.parametrize("split", [False, True])
def test_the_tokens_of_transformers_and_the_guesses_of_one_prompt_alone(
    models, oracle, kept_undivided, split, budget
):
    """All prompts at once, in chunks of many sizes. A budget may leave out guesses, and holds."""
    num_drafts, order = (3, PageOrder.NHD) if budget % 2 else (2, PageOrder.HND)
    runs = (divided if split else undivided)(models, num_drafts, budget, order=order)
    replica = runs.decoder if split else runs
    watched = Watched(replica)
    run = replica.runner.run

    def run_within(spans):
        assert sum(len(span.positions) for span in spans) <= budget
        return run(spans)

    replica.runner.run = run_within
    assert answers(replica, runs, list(oracle)) == oracle
    if budget == 512:
        assert watched.steps == kept_undivided[num_drafts]
    if split:
        runs.check_balance()


@pytest.mark.parametrize("budget", [3, 512])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_split_keeps_the_guesses_of_undivided(models, oracle, kept_undivided, num_drafts, budget):
    """One prompt after the other, so that the budget cuts no guesses."""
    messenger = divided(models, num_drafts, budget=max(budget, num_drafts + 1))
    watched = Watched(messenger.decoder)
    for prompt in oracle:
        assert answers(messenger.decoder, messenger, [prompt]) == {prompt: oracle[prompt]}
    assert watched.steps == kept_undivided[num_drafts]


@pytest.mark.parametrize("models", ["deepseek_v3", "llama"], indirect=True)
def test_without_the_hidden_state_of_the_tail_other_guesses_are_kept(
    models, oracle, kept_undivided
):
    messenger = divided(models, 2)
    watched = Watched(messenger.decoder)
    copy = messenger.copy

    def copy_without(chunk):
        copy(chunk)
        messenger.decoder.runner.kv_cache.tail_hidden.zero_()

    messenger.copy = copy_without
    assert answers(messenger.decoder, messenger, list(oracle)) == oracle
    assert watched.steps != kept_undivided[2]


@pytest.mark.parametrize("budget", [1, 3, 512])
@pytest.mark.parametrize("length", [2, P, P + 1, 3 * P + 2])
def test_draft_pages_of_a_prompt_are_those_of_the_undivided_engine(models, length, budget):
    """Of the draft layer, row i of a prompt is written when token i + 1 is known: by prefiller and
    undivided engine alike, whatever the chunks."""
    alone, messenger = undivided(models, 1), divided(models, 1, budget)
    replicas = alone, messenger.prefiller, messenger.decoder
    pages = [pages_of_the_next(replica) for replica in replicas]
    for replica, runs in ((alone, alone), (messenger.decoder, messenger)):
        answers(replica, runs, [prompt_of(length)], 1)
    rows = []
    for replica, indices in zip(replicas, pages, strict=True):
        first = replica.runner.model.config.num_layers
        drafts = torch.stack(replica.runner.kv_cache.layers[first:])[:, indices]
        rows.append(drafts.movedim(-2, 2).flatten(1, 2)[:, : length - 1].flatten(2))
    expected, *found = rows
    assert expected.abs().sum(-1).min() > 0, "no row was left out"
    for each in found:
        torch.testing.assert_close(each, expected)


def pages_of_the_next(replica: Replica) -> list[int]:
    """Where the next sequence that runs keeps its KV, once it has run."""
    pages: list[int] = []
    run = replica.runner.run

    def note(spans):
        pages[:] = pages or spans[0].page_indices
        return run(spans)

    replica.runner.run = note
    return pages


class Cheat(Drafter):
    """Guesses by the oracle, all of them right or all wrong."""

    def __init__(self, replica: Replica, oracle, right: bool) -> None:
        ours = replica.runner._drafter
        super().__init__(ours._source, ours._attention, ours._layers, ours._tail_hidden)
        self.running = replica.scheduler.running
        self.oracle, self.right = oracle, right
        replica.runner._drafter = self

    def guess(self, drafts, hidden, on_layer):
        starts = [draft.first + len(draft.after) - self._shift for draft in drafts]
        super().guess(list(drafts), hidden, on_layer)
        for draft, start in zip(drafts, starts, strict=True):
            [whose] = [s for s in self.running if s.page_indices == draft.page_indices]
            prompt = tuple(whose.tokens[: whose.num_prompt_tokens])
            text = (*prompt, *self.oracle[prompt])
            true = text[start : start + len(draft.guesses)]
            assert len(true) == len(draft.guesses), "no guess is made for what will not come"
            draft.guesses = tuple(t if self.right else (t + 1) % VOCABULARY for t in true)


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_guesses_that_are_always_right_or_always_wrong(models, oracle, split, right, num_drafts):
    """Wrong ones cross page borders, and leave no trace."""
    runs = (divided if split else undivided)(models, num_drafts)
    replica = runs.decoder if split else runs
    Cheat(replica, oracle, right)
    watched = Watched(replica)
    assert answers(replica, runs, list(oracle)) == oracle
    steps = list(itertools.chain(*watched.steps.values()))
    assert all(kept == (made if right else 0) for made, kept in steps)
    if right:  # the first token of a prompt of one has no guess before it
        longest = max(map(len, watched.steps.values()))
        assert longest <= 1 + -(-MAX_TOKENS // (num_drafts + 1))


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("sampling", [{"temperature": 1.3}, {"temperature": 0.8, "top_k": 3}])
def test_what_is_drawn_is_what_would_be_drawn_without_guesses(models, oracle, num_drafts, sampling):
    found = []
    for count in (0, num_drafts):
        replica = undivided(models, count)
        found.append(answers(replica, replica, list(oracle), 20, seed=11, **sampling))
    assert found[0] == found[1]


@pytest.mark.parametrize("right", [False, True])
def test_the_end_comes_inside_of_kept_guesses(models, oracle, right):
    """Stop tokens, and every `max_tokens`."""
    for prompt in map(prompt_of, (1, 2, P, 2 * P + 1)):
        tokens = oracle[prompt]
        for max_tokens in range(1, MAX_TOKENS + 1):
            replica = undivided(models, 3)
            Cheat(replica, oracle, right)
            stop = tokens[max_tokens - 1]
            first = replica.submit(prompt, max_tokens)
            second = replica.submit(prompt, MAX_TOKENS, stop_token_ids=(stop,))
            replica.run()
            assert replica.tokens[first] == tokens[:max_tokens]
            assert replica.ends[first] == (FinishReason.LENGTH, None)
            assert replica.tokens[second] == tokens[: tokens.index(stop) + 1]
            assert replica.ends[second] == (FinishReason.STOP, None)


@pytest.mark.parametrize("models", ["deepseek_v3"], indirect=True)
def test_guesses_are_those_of_transformers(models, oracle, monkeypatch):
    """Of its own MTP generation, which is for DeepSeek and has one guess at a time. It guesses
    nothing in its first step, so steps are not the same; the guess for a place behind a text is."""
    theirs: dict[tuple[int, ...], int] = {}
    get_candidates = MTPCandidateGenerator.get_candidates

    def note(generator, input_ids, *args, **kwargs):
        candidates, logits = get_candidates(generator, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            theirs[tuple(input_ids[0].tolist())] = int(candidates[0, -1])
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", note)
    layer = [rf"model\.layers\.{models[0].num_layers}\..*"]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", layer)
    reference = DeepseekV3ForCausalLM.from_pretrained(models[0].folder, dtype=torch.float32)
    ours: dict[tuple[int, ...], int] = {}
    for prompt in map(prompt_of, range(2, max(LENGTHS))):
        found = reference.generate(
            torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, use_mtp=True
        )
        assert found[0, len(prompt) :].tolist() == oracle[prompt]
        replica = undivided(models, 1)
        spied = Spy(replica)
        assert answers(replica, replica, [prompt]) == {prompt: oracle[prompt]}
        text = (*prompt, *oracle[prompt])
        ours |= {text[:place]: guess for place, guess in spied.guesses.items()}
    common = theirs.keys() & ours.keys()
    assert len(common) > 3 * len(LENGTHS)
    assert {text: ours[text] for text in common} == {text: theirs[text] for text in common}


class Spy(Drafter):
    """Notes the first guess by its place in the text; for one request alone."""

    def __init__(self, replica: Replica) -> None:
        ours = replica.runner._drafter
        super().__init__(ours._source, ours._attention, ours._layers, ours._tail_hidden)
        replica.runner._drafter = self
        self.guesses: dict[int, int] = {}

    def guess(self, drafts, hidden, on_layer):
        places = [draft.first + len(draft.after) - self._shift for draft in drafts]
        super().guess(list(drafts), hidden, on_layer)
        for place, draft in zip(places, drafts, strict=True):
            self.guesses |= {place: draft.guesses[0]} if draft.guesses else {}


def test_a_draft_vocabulary_in_another_order_guesses_the_same(tmp_path):
    found = []
    for tokens in ([], [5, 0, 3, 1, 4, 2]):
        folder = make_tiny_llama(tmp_path / f"{len(tokens)}", vocab_size=VOCABULARY)
        config = read_config(add_draft_layer(folder, tokens=tokens))
        replica = undivided([replace(config, num_draft_layers=1)], 1)
        spied = Spy(replica)
        answers(replica, replica, [prompt_of(P)], 20)
        found.append(spied.guesses)
    assert found[0] == found[1]
    assert len(set(found[0].values())) > 2, "too few to tell by"


#: Of 4 degrees of freedom, above which 1 in 10,000 true samples would be; draws have fixed seeds.
CHI_SQUARE = 23.5


@pytest.mark.parametrize(
    ("place", "wish"),
    [
        (0, {"temperature": 1.0}),
        pytest.param(2, {"temperature": 1.0}, marks=pytest.mark.slow),
        pytest.param(1, {"temperature": 1.5, "top_k": 4}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_drawn_as_without_guesses(tmp_path, place, wish):
    """20,000 draws from a vocabulary of 5, each beside a guess, of the token at this place among
    the likeliest: what comes first, and after a right guess next, has the model's probabilities."""
    folder = add_draft_layer(make_tiny_llama(tmp_path, vocab_size=5))
    config = replace(read_config(folder), num_draft_layers=1)
    cache = CacheConfig(num_pages=8, page_size=P, num_tail_slots=1, dtype="float32")
    computer = make_runner([config], cache)
    prompt = (1, 3, 0, 2, 2, 4)
    pages = (5, 2, 7)

    def run(first, token_ids, count, **more):
        wishes = [SamplingParams(seed=seed, **wish) for seed in range(count)]
        page = {"page_indices": pages, "first_token": first, "token_ids": token_ids}
        spans = [Span(number=0, sampling=each, **page, **more) for each in wishes]
        return [[token.token_id for token in result.tokens] for result in computer.run(spans)]

    def weights_after(*tokens):
        """Of the next token, by the definition of temperature and top_k."""
        text = torch.tensor([[*prompt, *tokens]])
        logits = reference(text).logits[0, -1] / wish["temperature"]
        kept = logits.topk(wish.get("top_k", 5)).values[-1]
        return logits.where(logits >= kept, float("-inf")).softmax(-1)

    def check(tokens, weights):
        counts = torch.tensor(tokens).bincount(minlength=5)
        expected = weights * len(tokens)
        assert not counts[expected == 0].any()
        possible = expected > 0
        terms = (counts - expected)[possible] ** 2 / expected[possible]
        assert terms.sum() < CHI_SQUARE, (counts, expected)

    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        run(0, prompt[:-1], 1)
        guess = int(weights_after().argsort(descending=True)[place])
        found = run(len(prompt) - 1, prompt[-1:], 20_000, drafts=(guess,))
        check([tokens[0] for tokens in found], weights_after())
        right = [tokens for tokens in found if tokens[0] == guess]
        assert {len(tokens) for tokens in right} == {2}, "a right guess is always kept"
        assert all(len(tokens) == 1 for tokens in found if tokens[0] != guess)
        check([tokens[1] for tokens in right], weights_after(guess))
