"""Whole nodes in this process, for tests: quick to start, with seams where a test can hold them.

Oracle          transformers' greedy tokens for many prompts of one model
pair()          a prefiller and a decoder that are connected, closed at the end
HeldNode        a node whose forward pass calls the test before each layer, and whose
                transfer engine the test makes
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from disagg.config import CacheConfig, MessengerConfig, SchedulerConfig
from disagg.engine.engine import Engine
from disagg.kv_layout import PageOrder
from disagg.request import FinishReason, Request, SamplingParams
from disagg.serve.answer import Answer
from disagg.serve.node import Node, NodeConfig
from disagg.transfer.transfer_engine import TransferEngine
from tests.balance import Balance, engine_balance
from tests.engines import shm_engine

DEADLINE_SECONDS = 30.0

#: Page size of most tests.
P = 4

#: Clocks for tests: short, but a machine busy with other tests must not look dead.
CLOCKS = MessengerConfig(peer_timeout=3.0, request_timeout=60.0, reconnect_interval=0.05)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids of the tiny model's vocabulary."""
    return tuple(random.Random(1000 * seed + length).choices(range(128), k=length))


class Oracle:
    """What transformers generates greedily in float32 with the model in a folder; remembers."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def __call__(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
            self._known[key] = tuple(output[0, len(prompt) :].tolist())
        return self._known[key]


def node_config(folder: Path, **settings: Any) -> NodeConfig:
    """float32, pages of 4. `settings` are fields of NodeConfig or of the configurations in it."""
    cache: dict[str, Any] = {"num_pages": 128, "page_size": P, "dtype": "float32"}
    cache |= {name: settings.pop(name) for name in _fields(CacheConfig) & settings.keys()}
    if "kv_layout" in cache:
        cache["kv_layout"] = PageOrder(cache["kv_layout"])
    limits = {name: settings.pop(name) for name in _fields(SchedulerConfig) & settings.keys()}
    clocks = {name: settings.pop(name) for name in _fields(MessengerConfig) & settings.keys()}
    return NodeConfig(
        model=folder,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**limits),
        messenger=replace(CLOCKS, **clocks),
        **settings,
    )


def _fields(kind: type) -> set[str]:
    return set(kind.__dataclass_fields__)


class HeldNode(Node):
    """`before_layer(layer)` is called in the engine thread, also with `num_layers` at the end:
    layer l's KV is written after `before_layer(l)`, and counted before `before_layer(l + 1)`."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        before_layer: Callable[[int], None] = lambda layer: None,
        make_transfer: Callable[[], TransferEngine] = shm_engine,
    ) -> None:
        self.before_layer = before_layer
        self.make_transfer = make_transfer
        super().__init__(config)

    def _build_transfer(self) -> TransferEngine:
        return self.make_transfer()

    def _build_engine(self) -> Engine:
        engine = super()._build_engine()
        if self.config.tp == 1:  # ranks are held by `gated_ranks.py`
            engine._runner.model = _HeldModel(engine._runner.model, self)
        return engine


class _HeldModel:
    def __init__(self, inner: Any, node: HeldNode) -> None:
        self.config = inner.config
        self.logits = inner.logits
        self._inner = inner
        self._node = node

    def forward(self, token_ids, positions, kv_pages, attention, on_layer):
        layer = 0

        def after_layer():
            nonlocal layer
            on_layer()
            layer += 1
            self._node.before_layer(layer)

        self._node.before_layer(0)
        return self._inner.forward(token_ids, positions, kv_pages, attention, after_layer)


@dataclass
class Pair:
    """A connected prefiller and decoder, and what was free before any request."""

    prefiller: HeldNode
    decoder: HeldNode

    def __post_init__(self) -> None:
        self.at_start = self.balance()

    def balance(self) -> tuple[Balance, Balance, int, int]:
        """What is free and open in engines and messengers of both nodes."""
        return balance_of(self.prefiller) + balance_of(self.decoder)

    def wait_for_balance(self) -> None:
        """Everything is free again, soon."""
        wait_until(lambda: self.balance() == self.at_start, lambda: f"balance {self.balance()}")


def balance_of(node: Node) -> tuple[Balance, int]:
    """What is free and open in a node's engine and in its messenger."""
    return engine_balance(node._engine), len(node._messenger._attempts)


@contextmanager
def pair(
    folder: Path,
    *,
    prefiller: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
    hold_prefiller: dict[str, Any] | None = None,
    hold_decoder: dict[str, Any] | None = None,
    **both: Any,
) -> Iterator[Pair]:
    """Settings as in `node_config`, for one node or for both; `hold_*` are those of HeldNode."""
    ours = node_config(folder, listen=("127.0.0.1", 0), **(both | (prefiller or {})))
    with HeldNode(ours, **(hold_prefiller or {})) as prefiller_node:
        theirs = node_config(
            folder, prefillers=(prefiller_node.address,), **(both | (decoder or {}))
        )
        with HeldNode(theirs, **(hold_decoder or {})) as decoder_node:
            yield Pair(prefiller_node, decoder_node)


def start_together(stack: ExitStack, *configs: NodeConfig) -> list[Node]:
    """Nodes that start at the same time, closed with the stack, the last one first."""
    with ThreadPoolExecutor(len(configs)) as pool:
        starting = [pool.submit(Node, config) for config in configs]
    for done in starting:
        if done.exception() is None:
            stack.enter_context(done.result())
    return [done.result() for done in starting]


def ask(node: Node, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Submit a prompt."""
    sampling = SamplingParams(max_tokens=max_tokens)
    return node.submit(Request(prompt_token_ids=tuple(prompt), sampling=sampling))


def tokens_of(handle: Answer) -> tuple[int, ...]:
    """Its output, which must have ended by its length."""
    completion = handle.result(DEADLINE_SECONDS)
    assert completion.finish_reason is FinishReason.LENGTH, completion
    return completion.token_ids


def wait_until(
    condition: Callable[[], bool],
    what: Callable[[], str] | str = "",
    seconds: float = DEADLINE_SECONDS,
) -> None:
    """Look again and again until it is so; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        text = what if isinstance(what, str) else what()
        assert time.monotonic() < end, f"not within {seconds} s: {text}"
        time.sleep(0.002)
