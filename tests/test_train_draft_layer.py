"""The draft layer's trainer, on a tiny random model: what it computes, trains on and writes."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from pytest import approx
from safetensors import safe_open
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from disagg.request import SamplingParams
from tests import train_draft_layer as trainer
from tests.draft_layer import DraftLayer, chain, load_layer, save_layer
from tests.draft_prompts import HELD_OUT, other_prompts, subject_prompts
from tests.draft_text import Text, Writer, load_texts, save_texts, user_turns
from tests.test_tokenizer import save_byte_tokenizer
from tests.tiny_models import make_tiny_llama

HIDDEN, LAYER = 64, "model.layers.3."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_llama(path, vocab_size=300, tie_word_embeddings=True, eos_token_id=257)
    return save_byte_tokenizer(path)


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[Text]:
    prompts = [[256, *range(40, 45 + i)] for i in range(6)]
    how = [SamplingParams(max_tokens=20 + i, ignore_eos=True) for i in range(6)]
    return Writer(folder, "float32").answer(prompts, how)


def test_text_and_states_are_the_models_own(folder: Path, texts: list[Text]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text in texts:
        with torch.inference_mode():
            found = model(text.tokens.long()[None], output_hidden_states=True)
        torch.testing.assert_close(
            text.hidden.float(), found.hidden_states[-1][0, :-1], atol=0.01, rtol=0.01
        )
        answer = slice(text.num_prompt - 1, -1)
        assert torch.equal(found.logits[0, answer].argmax(-1), text.tokens[text.num_prompt :])


def test_saved_texts_come_back(texts: list[Text], tmp_path: Path) -> None:
    save_texts(texts, tmp_path / "a.safetensors")
    for before, after in zip(texts, load_texts([tmp_path / "a.safetensors"]), strict=True):
        assert torch.equal(before.tokens, after.tokens)
        assert torch.equal(before.hidden, after.hidden)
        assert before.num_prompt == after.num_prompt


def test_layer_computes_the_formula(folder: Path) -> None:
    """Against the plain model: one layer, whose input is what the formula says."""
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    torch.manual_seed(1)
    layer = DraftLayer(config).requires_grad_(False)
    for norm in (layer.enorm, layer.hnorm, layer.shared_head["norm"]):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    embedded, hidden = torch.randn(2, 7, HIDDEN), torch.randn(2, 7, HIDDEN)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    joined = torch.cat((norm(embedded, layer.enorm.weight), norm(hidden, layer.hnorm.weight)), -1)
    plain = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=1).model
    plain.load_state_dict(
        {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}, strict=False
    )
    plain.norm.weight.data = layer.shared_head["norm"].weight
    with torch.inference_mode():
        wanted = plain(inputs_embeds=joined @ layer.eh_proj.weight.T).last_hidden_state
    (found,) = chain(layer, embedded, hidden, steps=1)
    torch.testing.assert_close(found, wanted)


def test_later_guesses_follow_from_earlier_ones(folder: Path) -> None:
    """Against steps done one by one: rows up to r as they are, then h' in place of h."""
    layer = DraftLayer(
        AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    ).requires_grad_(False)
    embedded, hidden = torch.randn(1, 9, HIDDEN), torch.randn(1, 9, HIDDEN)
    chained = chain(layer, embedded, hidden, steps=3)
    for row in (2, 5):
        states = hidden[:, : row + 1]
        for step in range(3):
            count = states.shape[1]
            (found,) = chain(layer, embedded[:, :count], states, steps=1)
            torch.testing.assert_close(chained[step][:, row + step], found[:, -1])
            states = torch.cat((states, found[:, -1:]), 1)


def test_file_holds_the_layer_to_a_sixteenth(folder: Path, tmp_path: Path) -> None:
    """float8 has 3 bits behind the point. A row of zeros stays one."""
    config = AutoConfig.from_pretrained(folder)
    layer = DraftLayer(config).requires_grad_(False)
    layer.mlp.up_proj.weight[1] = 0.0
    save_layer(layer, torch.tensor([3, 5], dtype=torch.int32), tmp_path / "file", {})
    found, token_ids = load_layer(config, tmp_path / "file")
    assert token_ids.tolist() == [3, 5]
    for (name, before), after in zip(layer.named_parameters(), found.parameters(), strict=True):
        smallest = before.abs().amax(-1, keepdim=True) * 2**-10
        error = (after - before).abs()
        assert (error <= torch.maximum(before.abs() / 16, smallest)).all(), name


def test_teacher_counts_right_guesses_of_answers(texts: list[Text]) -> None:
    """With a layer that hands on the next state, every guess is what the target says; with one that
    hands on its own, it is the token before."""
    hidden = torch.eye(300)
    tokens = torch.tensor([5, 6, 7, 8, 8, 9], dtype=torch.int32)
    text = Text(tokens=tokens, hidden=hidden[tokens[1:].long()].half(), num_prompt=3)
    teacher = trainer.Teacher(embedding=hidden, head=hidden, common=torch.arange(300))

    def share(layer: object, *token_ids: int) -> float:
        (accepted,) = teacher.acceptance(layer, torch.tensor(token_ids), [text], steps=1)
        return accepted

    assert share(lambda e, h, p, m: F.pad(h[:, 1:], (0, 0, 0, 1)), *range(300)) == approx(2 / 3)
    assert share(lambda e, h, p, m: h, *range(300)) == approx(1 / 3)
    assert share(lambda e, h, p, m: h, *range(8)) == 0  # 8 is no token that it can guess


def test_train_lowers_the_loss_and_writes_the_file(
    folder: Path, texts: list[Text], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_texts(texts, tmp_path / "part_000.safetensors")
    save_texts(texts, tmp_path / trainer.MEASURED)
    file = tmp_path / "draft.safetensors"
    common = f"--model {folder} --data {tmp_path} --file {file} --threads 1"
    how = "--epochs 15 --batch-tokens 60 --lr 0.05 --averaged 0.5 --vocabulary 120 --steps 1"
    trainer.main(f"train {common} {how}".split())
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said(capsys, "loss")]
    assert losses[-1] < losses[0] - 0.3
    trainer.main(f"measure {common}".split())
    assert float(said(capsys, "guess 1")[0].split()[3]) > 0.5

    with safe_open(file, "pt") as stored:
        found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        assert "train" in stored.metadata()["made by"]
        assert str(tmp_path) not in str(stored.metadata())
    matrices = {
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (32, HIDDEN),
        "self_attn.v_proj": (32, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (96, HIDDEN),
        "mlp.up_proj": (96, HIDDEN),
        "mlp.down_proj": (HIDDEN, 96),
    }
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes = {f"{LAYER}{n}.weight": (shape, torch.float8_e4m3fn) for n, shape in matrices.items()}
    shapes |= {
        f"{LAYER}{n}.weight_scale": (shape[:1], torch.float32) for n, shape in matrices.items()
    }
    shapes |= {f"{LAYER}{n}.weight": ((HIDDEN,), torch.float32) for n in norms}
    shapes[f"{LAYER}shared_head.token_ids"] = ((120,), torch.int32)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == shapes


def test_training_goes_on_where_it_stopped(folder: Path, texts: list[Text], tmp_path: Path) -> None:
    """One epoch and then another one, from a checkpoint, are the two of one run."""
    config, target = (
        AutoConfig.from_pretrained(folder, attn_implementation="sdpa"),
        trainer.read_target(folder),
    )
    teacher = trainer.teacher_of(target, torch.arange(120))
    first = trainer.initial_layer(config, target, folder, texts)
    flags = Namespace(epochs=2, batch_tokens=60, lr=0.01, averaged=0.1)
    found = []
    for stop in (False, True):
        torch.manual_seed(0)
        training = trainer.Training(copy.deepcopy(first), teacher)
        training.epoch(texts, flags)
        if stop:
            training.save(tmp_path / "checkpoint.pt")
            training = trainer.Training(copy.deepcopy(first), teacher)
            training.load(tmp_path / "checkpoint.pt")
        training.epoch(texts, flags)
        found.append(training)
    for part in ("layer", "average"):
        one, other = (getattr(training, part).state_dict() for training in found)
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor)
        assert not torch.equal(one["eh_proj.weight"], first.eh_proj.weight)


def test_user_turns_are_whole_prompts(folder: Path) -> None:
    """What the model draws goes between what the chat template writes around a message."""

    class Draws:
        def answer(self, prompts, how):
            ends = [[65] * 9 + [257], [65] * 9, [257]]  # a turn, one without its end, an empty one
            return [
                Text(tokens=torch.tensor([*p, *end]), hidden=torch.empty(0), num_prompt=len(p))
                for p, end in zip(prompts, ends, strict=True)
            ]

    tokenizer = trainer.Tokenizer(folder)
    assert user_turns(Draws(), tokenizer, 3, seed=0) == [tokenizer.encode("A" * 9, chat=True)]


def test_each_part_is_written_by_one_process(folder: Path, tmp_path: Path) -> None:
    """A part that another process holds is left to it; one that is there stays as it is."""
    flags = f"write --model {folder} --data {tmp_path} --parts 2 --prompts 6 --max-tokens 4".split()
    first, second, held_out = (
        tmp_path / f"{name}.safetensors" for name in ("part_000", "part_001", "held_out")
    )
    with FileLock(first.with_suffix(".lock")):
        trainer.main(flags)
    assert second.exists() and not first.exists()
    assert len(load_texts([held_out])) == len(HELD_OUT)
    written = second.stat()
    trainer.main(flags)
    assert second.stat() == written
    before, after = load_texts([first]), load_texts([second])
    assert len(before) >= 4 and len(after) >= 4
    assert {tuple(text.tokens.tolist()) for text in before}.isdisjoint(
        tuple(text.tokens.tolist()) for text in after
    )


def test_nothing_is_measured_that_is_trained_on() -> None:
    for written in subject_prompts(seed=0), other_prompts(seed=0):
        assert len({*written}) > 1500
        assert not {*written} & {*HELD_OUT}


def said(capsys: pytest.CaptureFixture[str], what: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if what in line]
