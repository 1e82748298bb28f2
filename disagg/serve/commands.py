"""What the two launch scripts do once torch is loaded: build a node, serve or answer, print.

Standard output carries results only; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue

from disagg.config import CacheConfig, MessengerConfig, SchedulerConfig
from disagg.kv_layout import PageOrder
from disagg.messenger.prefillers import Address
from disagg.request import FinishReason, Output, Request
from disagg.serve.answer import Answer
from disagg.serve.child_prefiller import LISTENING, ChildPrefiller
from disagg.serve.default_model import resolve_model
from disagg.serve.exits import EXIT_DONE, EXIT_FAILED, UsageError
from disagg.serve.handle import Completion, RequestHandle
from disagg.serve.node import Node, NodeConfig, NodeError
from disagg.serve.options import forwarded_flags, given
from disagg.serve.prompts import Prompt
from disagg.serve.report import as_json, summary
from disagg.serve.tokenizer import Tokenizer
from disagg.transfer.interface import TransferError


def serve_prefill(arguments: argparse.Namespace) -> int:
    """Listen until interrupted; the exit code."""
    arguments = _resolve(arguments)
    with _start(arguments) as node:
        assert node.address is not None, "a prefiller listens"
        host, port = node.address
        print(f"{LISTENING}{host}:{port}", flush=True)
        try:
            node.wait()
        except NodeError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_FAILED
    return EXIT_DONE


def answer_prompts(arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> int:
    """Answer every prompt, all at once; print the answers in order of input. The exit code."""
    arguments = _resolve(arguments)
    with ExitStack() as stack:
        prefillers = arguments.prefill
        if not prefillers and not arguments.colocated:
            # With a timeline, time for its last step and to write its own.
            patience = 10.0 if arguments.trace else 0.0
            child = ChildPrefiller(forwarded_flags(arguments), patience=patience)
            prefillers = (stack.enter_context(child).address(),)
        with _usage_errors():
            tokenizer = Tokenizer(arguments.model)
        node = stack.enter_context(_start(arguments, prefillers))
        news: SimpleQueue[int] = SimpleQueue()
        start = time.monotonic()
        answers = [
            _submit(node, tokenizer, prompt, raw=arguments.raw, on_news=partial(news.put, index))
            for index, prompt in enumerate(prompts)
        ]
        ends = [
            _print_answer(index, answer, lambda: answers[news.get()].read(), arguments)
            for index, answer in enumerate(answers)
        ]
        seconds = time.monotonic() - start
    if not arguments.json and sys.stderr.isatty():
        print(summary(ends, seconds), file=sys.stderr)
    return EXIT_DONE if all(end.error is None for end in ends) else EXIT_FAILED


def _resolve(arguments: argparse.Namespace) -> argparse.Namespace:
    """The flags with the model's folder."""
    with _usage_errors():
        folder = resolve_model(arguments.model)
    return argparse.Namespace(**{**vars(arguments), "model": folder})


def _start(arguments: argparse.Namespace, prefillers: tuple[Address, ...] = ()) -> Node:
    """A node as the flags describe it; UsageError if it cannot be or cannot start."""
    layout = {"kv_layout": PageOrder(arguments.kv_layout)}
    if arguments.trace is not None:
        print(f"timeline: {arguments.trace}", file=sys.stderr)
    with _usage_errors():
        config = NodeConfig(
            **given(NodeConfig, arguments),
            cache=CacheConfig(**given(CacheConfig, arguments) | layout),
            scheduler=SchedulerConfig(**given(SchedulerConfig, arguments)),
            messenger=MessengerConfig(**given(MessengerConfig, arguments)),
            prefillers=prefillers,
        )
        return Node(config)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What goes wrong before there is a node to talk to is the user's to put right."""
    try:
        yield
    except (ValueError, TransferError, NodeError) as error:
        raise UsageError(str(error)) from error


def _submit(
    node: Node, tokenizer: Tokenizer, prompt: Prompt, *, raw: bool, on_news: Callable[[], None]
) -> Answer:
    """The answer to come; one that has ended already if the prompt is refused."""
    token_ids: Sequence[int] = ()
    try:
        if isinstance(prompt.content, str):
            chat = not raw and bool(prompt.content)
            token_ids = tokenizer.encode(prompt.content, chat=chat)
        else:
            token_ids = prompt.content
        request = Request(prompt_token_ids=tuple(token_ids), sampling=prompt.sampling)
        handle = node.submit(request, on_news=on_news)
    except (ValueError, RuntimeError) as error:
        handle = RequestHandle(len(token_ids), on_news=on_news)
        handle.put(Output(finish_reason=FinishReason.ERROR, error=str(error)))
    return Answer(handle, tokenizer.stream(), prompt.sampling)


def _print_answer(
    index: int, answer: Answer, wait: Callable[[], None], arguments: argparse.Namespace
) -> Completion:
    """Print one answer, as it comes unless JSON is wanted; return how it ended.

    `wait` returns when this or another answer has taken in something new: those that are printed
    later are read meanwhile, since they may reach a stop string, too.
    """
    while (completion := answer.completion) is None:
        wait()
        if not arguments.json:
            print(answer.take(), end="", flush=True)
    if arguments.json:
        logprobs = answer.sampling.logprobs is not None
        found = as_json(index, answer.text, completion, logprobs=logprobs)
        print(json.dumps(found), flush=True)
    else:
        print(answer.take(), flush=True)
    if completion.error is not None:
        print(f"error: prompt {index}: {completion.error}", file=sys.stderr)
    return completion
