"""Makes a draft layer for a Llama model that has none, from text that the model writes itself.

    python -m tests.train_draft_layer write   --data DIR             # parts of text, one a file
    python -m tests.train_draft_layer train   --data DIR --file FILE
    python -m tests.train_draft_layer measure --data DIR --file FILE

    target   t_i ---------------------> h_i (after the final norm) ----> t_{i+1}
    draft    block(eh_proj(cat[enorm(emb(t_{i+1})), hnorm(h_i)])) = x_i;  h'_i = norm(x_i)
             head(h'_i) guesses t_{i+2}, and is taught by head(h_{i+1})

The form is DeepSeek-V3's multi-token prediction (section 2.2 of its report): `block` is a decoder
layer like the model's, row i is at position i, embedding and head are the target's, frozen. Here
the head's rows are only those of the tokens that are frequent in the text: a guess must be cheap.

Each step may be stopped and started again: `write` leaves out parts that are there or that another
process writes (one of `--threads 1` for each core is fastest), `train` goes on from its last
checkpoint. The file holds matrices in float8 with a scale for each row.
"""

import argparse
import copy
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, LlamaConfig

from disagg.request import SamplingParams
from disagg.serve.default_model import resolve_model
from disagg.serve.tokenizer import Tokenizer
from tests.draft_layer import DraftLayer, chain, load_layer, save_layer
from tests.draft_prompts import HELD_OUT
from tests.draft_text import Text, Writer, load_texts, save_texts, write_part

#: Texts by which the first linear map is found, and how much it is held back.
FITTED, RIDGE = 160, 0.05
#: Files of text: to measure with, and to train on.
MEASURED, PART = "held_out.safetensors", "part_{}.safetensors"
#: Tokens that a guess is compared with in training, beside those of the batch.
NUM_COMMON, NUM_DRAWN = 2048, 512
#: Batches between two lines about them.
REPORTED = 25


# --- Training ---


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Texts of about one length, filled up with zeros: `tokens` int64 `[B, N]`, `hidden` float32
    `[B, N - 1, H]`, and which of the rows `[B, N - 2]` guess a token of an answer."""

    tokens: Tensor
    hidden: Tensor
    counts: Tensor


def make_batch(texts: Sequence[Text]) -> Batch:
    """The texts, in this order."""
    pad = nn.utils.rnn.pad_sequence
    tokens = pad([text.tokens.long() for text in texts], batch_first=True)
    hidden = pad([text.hidden for text in texts], batch_first=True).float()
    row = torch.arange(tokens.shape[1] - 2)
    lengths = torch.tensor([len(text.tokens) for text in texts])[:, None]
    num_prompts = torch.tensor([text.num_prompt for text in texts])[:, None]
    return Batch(
        tokens=tokens, hidden=hidden, counts=(row + 2 >= num_prompts) & (row + 2 < lengths)
    )


def batches(texts: Sequence[Text], num_tokens: int, seed: int) -> list[list[Text]]:
    """All texts in groups of some `num_tokens` and about one length, in random order."""
    draw = random.Random(seed)
    groups: list[list[Text]] = [[]]
    for text in sorted(texts, key=lambda text: len(text.tokens) + draw.uniform(0, 8)):
        if (len(groups[-1]) + 1) * len(text.tokens) > num_tokens:
            groups.append([])
        groups[-1].append(text)
    draw.shuffle(groups)
    return groups


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The target's frozen embedding and head, both `[V, H]`, and the ids of its common tokens."""

    embedding: Tensor
    head: Tensor
    common: Tensor

    def loss(self, layer: DraftLayer, batch: Batch) -> tuple[Tensor, Tensor]:
        """The cross entropy of guesses and of what the target gives each token, and the share of
        guesses that are right: among common tokens, those of the batch, and some others."""
        (found,) = self.chain(layer, batch, steps=1)
        drawn = torch.randint(len(self.head), (NUM_DRAWN,))
        token_ids = torch.cat((self.common, batch.tokens[:, 2:][batch.counts], drawn)).unique()
        head = self.head[token_ids]
        taught = F.linear(batch.hidden[:, 1:][batch.counts], head)
        guessed = F.linear(found[batch.counts], head)
        right = guessed.argmax(-1) == taught.argmax(-1)
        return F.cross_entropy(guessed, taught.softmax(-1)), right.float().mean()

    @torch.inference_mode()
    def acceptance(
        self, layer: DraftLayer, token_ids: Tensor, texts: Sequence[Text], steps: int
    ) -> list[float]:
        """Of the answers' tokens, the share that each step guesses right given that the guesses
        before were right; for the first step that is how many first drafts are accepted. Guesses
        are among `token_ids`."""
        right, total, head = [0] * steps, [0] * steps, self.head[token_ids]
        for group in batches(texts, 4096, seed=0):
            batch = make_batch(group)
            so_far = batch.counts
            for step, found in enumerate(self.chain(layer, batch, steps)):
                guesses = token_ids[F.linear(found, head).argmax(-1)]
                total[step] += int(so_far.sum())
                so_far = so_far & (guesses == batch.tokens[:, 2:])
                right[step] += int(so_far.sum())
                # The next step's row follows; of its own right it guesses a token of an answer.
                so_far = F.pad(so_far[:, :-1], (1, 0)) & batch.counts
        return [r / max(t, 1) for r, t in zip(right, total, strict=True)]

    def chain(self, layer: DraftLayer, batch: Batch, steps: int) -> list[Tensor]:
        """`chain` of all rows of a batch that have a token to guess."""
        embedded = F.embedding(batch.tokens[:, 1:-1], self.embedding)
        return chain(layer, embedded, batch.hidden[:, :-1], steps)


def initial_layer(
    config: LlamaConfig, target: Mapping[str, Tensor], folder: Path, texts: Sequence[Text]
) -> DraftLayer:
    """The target's last layer, before it a guess of the state that this layer will be given at the
    next position: the linear one with the least squared error in some texts.

    Such a layer is right a quarter of the time, which takes an epoch to learn. The state has
    another scale than a fresh layer's; what is added to it is brought to scale 1, too.
    """
    layer, last = DraftLayer(config), config.num_hidden_layers - 1
    prefix = f"model.layers.{last}."
    weights = {n.removeprefix(prefix): t for n, t in target.items() if n.startswith(prefix)}
    layer.load_state_dict(weights, strict=False)
    before_last = AutoModel.from_pretrained(folder, dtype=torch.float32)
    before_last.layers, before_last.norm = before_last.layers[:last], nn.Identity()
    squares, products, scale = torch.zeros(()), torch.zeros(()), 0.0
    with torch.no_grad():
        for group in batches(texts[:FITTED], 2048, seed=0):
            batch = make_batch(group)
            embedded = F.embedding(batch.tokens[:, 1:-1], target["model.embed_tokens.weight"])
            given = torch.cat((layer.enorm(embedded), layer.hnorm(batch.hidden[:, :-1])), -1)
            wanted = before_last(batch.tokens).last_hidden_state[:, 1:-1]
            given, wanted = given[batch.counts], wanted[batch.counts]
            squares, products = squares + given.T @ given, products + given.T @ wanted
            scale = wanted.pow(2).mean().sqrt()
        damped = squares + RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
        layer.eh_proj.weight.copy_(torch.linalg.solve(damped, products).T / scale)
        layer.self_attn.o_proj.weight /= scale
        layer.mlp.down_proj.weight /= scale
        # Less sure of itself than the target.
        layer.shared_head["norm"].weight.copy_(target["model.norm.weight"] * 0.7)
    return layer


def frequent_tokens(texts: Sequence[Text], count: int, vocab_size: int) -> Tensor:
    """Ids, int32 `[count]` and rising, of the tokens that answers have most often."""
    answers = torch.cat([text.tokens[text.num_prompt :] for text in texts]).long()
    often = torch.bincount(answers, minlength=vocab_size).argsort(descending=True, stable=True)
    return often[:count].sort().values.int()


class Training:
    """A layer in training and its moving average, which is what is used; `epochs` are done."""

    def __init__(self, layer: DraftLayer, teacher: Teacher) -> None:
        self.layer, self.average, self.teacher = layer, copy.deepcopy(layer), teacher
        self.layer.train()
        # Weights are of very different sizes, and each is to change by a like part of its own.
        self.optimizer = torch.optim.AdamW(
            [{"params": [p], "size": p.square().mean().sqrt().item()} for p in layer.parameters()],
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self.epochs = 0
        self._parts = {"layer": layer, "average": self.average, "optimizer": self.optimizer}

    def epoch(self, texts: Sequence[Text], flags: argparse.Namespace) -> None:
        """Train on all texts once."""
        groups = batches(texts, flags.batch_tokens, seed=self.epochs)
        losses, rights = [], []
        for number, group in enumerate(groups, start=1):
            rate = learning_rate((self.epochs + number / len(groups)) / flags.epochs)
            for weights in self.optimizer.param_groups:
                weights["lr"] = flags.lr * rate * weights["size"]
            loss, right = self.teacher.loss(self.layer, make_batch(group))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for kept, new in zip(
                    self.average.parameters(), self.layer.parameters(), strict=True
                ):
                    kept.lerp_(new, flags.averaged)
            losses.append(loss.item())
            rights.append(right.item())
            if number % REPORTED == 0 or number == len(groups):
                say(
                    f"epoch {self.epochs + 1}, {number} of {len(groups)}:"
                    f" loss {fmean(losses[-REPORTED:]):.3f}, right {fmean(rights[-REPORTED:]):.3f}"
                )
        self.epochs += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint, which is complete as soon as it is there."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        partial = path.with_suffix(".partial")
        torch.save(states | {"epochs": self.epochs}, partial)
        partial.rename(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        states = torch.load(path, weights_only=True)
        self.epochs = states["epochs"]
        for name, part in self._parts.items():
            part.load_state_dict(states[name])


def learning_rate(progress: float) -> float:
    """Of its highest: it rises for the first hundredth, and falls in the last third."""
    return min(1.0, 100 * progress, 3 * (1 - progress) + 0.01)


# --- Steps ---


def write(folder: Path, flags: argparse.Namespace) -> None:
    """The held-out texts, then those to train on, in parts; each part by one process."""
    writer, tokenizer = Writer(folder, flags.dtype), Tokenizer(folder)
    flags.data.mkdir(parents=True, exist_ok=True)
    for part in range(-1, flags.parts):
        path = flags.data / (PART.format(f"{part:03}") if part >= 0 else MEASURED)
        # The kernel lets go of the lock of a process that was killed.
        with suppress(Timeout), FileLock(path.with_suffix(".lock"), timeout=0):
            if path.exists():
                continue
            if part >= 0:
                texts = write_part(writer, tokenizer, part, flags.prompts, flags.max_tokens)
            else:
                prompts = [tokenizer.encode(prompt, chat=True) for prompt in HELD_OUT]
                how = SamplingParams(max_tokens=flags.max_tokens)
                texts = writer.answer(prompts, [how] * len(prompts))
            save_texts(texts, path)
            say(f"{path.name}: {len(texts)} texts, {num_answer_tokens(texts)} tokens of answers")


def train(folder: Path, flags: argparse.Namespace) -> None:
    """Train on all parts that are there, also on those that come meanwhile; the file is written
    after each epoch."""
    config, target = (
        AutoConfig.from_pretrained(folder, attn_implementation="sdpa"),
        read_target(folder),
    )
    texts, measured = load_parts(flags.data), load_texts([flags.data / MEASURED])
    common = frequent_tokens(texts, NUM_COMMON, config.vocab_size)
    teacher = teacher_of(target, common.long())
    checkpoint = flags.data / "checkpoint.pt"
    going_on = checkpoint.exists()
    layer = DraftLayer(config) if going_on else initial_layer(config, target, folder, texts)
    training = Training(layer, teacher)
    if going_on:
        training.load(checkpoint)
    while training.epochs < flags.epochs:
        texts = load_parts(flags.data)
        tokens = num_answer_tokens(texts)
        say(f"{tokens} tokens of answers in {len(texts)} texts")
        training.epoch(texts, flags)
        training.save(checkpoint)
        token_ids = frequent_tokens(texts, flags.vocabulary, config.vocab_size)
        made = {
            "made by": f"tests/train_draft_layer.py, --epochs {flags.epochs} --lr {flags.lr}"
            f" --batch-tokens {flags.batch_tokens} --vocabulary {flags.vocabulary}",
            "trained on": f"{tokens} tokens of answers, {training.epochs} epochs",
        }
        save_and_measure(training, token_ids, measured, flags, made)


def save_and_measure(
    training: Training,
    token_ids: Tensor,
    texts: Sequence[Text],
    flags: argparse.Namespace,
    made: Mapping[str, str],
) -> None:
    """Write the file; what it then accepts is part of what it says about itself."""
    config, average, teacher = training.layer.config, training.average, training.teacher
    save_layer(average, token_ids, flags.file, made)
    found, _ = load_layer(config, flags.file)
    exact, stored = (
        teacher.acceptance(layer, token_ids.long(), texts, flags.steps)
        for layer in (average, found)
    )
    shares = ", ".join(f"{share:.3f}" for share in stored)
    save_layer(average, token_ids, flags.file, made | {"accepted": shares})
    say(f"after {training.epochs} epochs {shares} accepted, {exact[0]:.3f} before rounding")


def measure(folder: Path, flags: argparse.Namespace) -> None:
    """Print the acceptance of a file's guesses in the held-out texts."""
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    layer, token_ids = load_layer(config, flags.file)
    texts = load_texts([flags.data / MEASURED])
    teacher = teacher_of(read_target(folder), token_ids)
    shares = teacher.acceptance(layer, token_ids.long(), texts, flags.steps)
    for step, share in enumerate(shares, start=1):
        say(f"guess {step}: {share:.3f} accepted")


def num_answer_tokens(texts: Sequence[Text]) -> int:
    return sum(len(text.tokens) - text.num_prompt for text in texts)


def read_target(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors, in float32."""
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor.float() for shard in shards for name, tensor in shard.items()}


def teacher_of(target: Mapping[str, Tensor], common: Tensor) -> Teacher:
    embedding = target["model.embed_tokens.weight"]
    head = target.get("lm_head.weight", embedding)
    return Teacher(embedding=embedding, head=head, common=common)


def load_parts(data: Path) -> list[Text]:
    """What there is to train on."""
    return load_texts(sorted(data.glob(PART.format("*"))))


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Do one step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    steps = {"write": write, "train": train, "measure": measure}
    parser.add_argument("step", choices=steps)
    parser.add_argument("--model", default=None, help="a folder; by default the default model")
    parser.add_argument("--data", type=Path, required=True, help="where text and checkpoint are")
    parser.add_argument("--file", type=Path, help="the draft layer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of the model that writes")
    parser.add_argument("--parts", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=192, help="of each part")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that are guessed")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=0.005, help="times a weight's size")
    parser.add_argument("--averaged", type=float, default=0.01, help="part of each new layer")
    parser.add_argument("--steps", type=int, default=3, help="guesses in a row that are measured")
    flags = parser.parse_args(arguments)
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    steps[flags.step](resolve_model(flags.model), flags)


if __name__ == "__main__":
    main()
