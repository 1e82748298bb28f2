"""What the two launch scripts do once torch is loaded: build a node, serve or answer, print.

Standard output carries results only; everything else goes to standard error.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue

from disagg.request import FinishReason, Output, Request
from disagg.serve.answer import Answer, News, as_json
from disagg.serve.child_prefiller import LISTENING, ChildPrefiller
from disagg.serve.default_model import resolve_model
from disagg.serve.exits import EXIT_DONE, EXIT_FAILED
from disagg.serve.node import Node, NodeConfig
from disagg.serve.options import forwarded_flags, given
from disagg.serve.prompts import Prompt
from disagg.serve.tokenizer import Tokenizer


def serve_prefill(arguments: argparse.Namespace) -> int:
    """Listen until interrupted; the exit code."""
    _resolve_models(arguments)
    with Node(given(NodeConfig, arguments)) as node:
        assert node.address is not None, "a prefiller listens"
        print(LISTENING + "{}:{}".format(*node.address), flush=True)
        if (why := node.wait()) is not None:
            print(f"error: {why}", file=sys.stderr)
            return EXIT_FAILED
    return EXIT_DONE


def answer_prompts(arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> int:
    """Answer every prompt, all at once; print the answers in order of input. The exit code."""
    _resolve_models(arguments)
    tokenizer = Tokenizer(arguments.model)
    with ExitStack() as stack:
        if not arguments.prefillers and not arguments.colocated:
            # With a timeline, time for its last step and to write its own.
            patience = 10.0 if arguments.trace else 0.0
            child = ChildPrefiller(forwarded_flags(arguments), patience=patience)
            arguments.prefillers = (stack.enter_context(child).address(),)
        node = stack.enter_context(Node(given(NodeConfig, arguments)))
        news: News = SimpleQueue()
        start = time.monotonic()
        answers = [_submit(node, tokenizer, prompt, arguments.raw, news) for prompt in prompts]
        ends = [_print_answer(index, answer, arguments) for index, answer in enumerate(answers)]
        seconds = time.monotonic() - start
    if not arguments.json and sys.stderr and sys.stderr.isatty():
        print(summary(ends, seconds), file=sys.stderr)
    return EXIT_DONE if all(end.error is None for end in ends) else EXIT_FAILED


def _resolve_models(arguments: argparse.Namespace) -> None:
    arguments.model = resolve_model(arguments.model)
    if arguments.draft_model is not None:
        arguments.draft_model = resolve_model(arguments.draft_model)


def _submit(node: Node, tokenizer: Tokenizer, prompt: Prompt, raw: bool, news: News) -> Answer:
    """The answer to come; one that has ended already if the prompt is refused."""
    request, content = Request(prompt_token_ids=(), sampling=prompt.sampling), prompt.content
    try:
        if isinstance(content, str):
            content = tuple(tokenizer.encode(content, chat=not raw and bool(content)))
        request = replace(request, prompt_token_ids=content)
        return node.submit(request, stream=tokenizer.stream(), news=news)
    except (ValueError, RuntimeError) as error:
        answer = Answer(request, news=news)
        answer.put(Output(finish_reason=FinishReason.ERROR, error=str(error)))
        return answer


def _print_answer(index: int, answer: Answer, arguments: argparse.Namespace) -> Output:
    """Print one answer, as it comes unless JSON is wanted; return how it ended."""
    while (completion := answer.completion) is None:
        answer.wait()
        if not arguments.json:
            print(answer.take(), end="", flush=True)
    print(json.dumps(as_json(index, answer)) if arguments.json else answer.take(), flush=True)
    if completion.error is not None:
        print(f"error: prompt {index}: {completion.error}", file=sys.stderr)
    return completion


def summary(completions: Sequence[Output], seconds: float) -> str:
    """Tokens a second, mean time to first token, and what was moved, of all prompts together.

    Hidden is the share of the transfers' time in which prefillers computed, see `TransferStats`.
    """
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    known = [c.timings.first_token for c in completions if c.timings and c.timings.first_token]
    moved = [c.transfer for c in completions if c.transfer]
    first = f"{sum(known) / len(known):.3f} s to the first token" if known else "no first token"
    span = sum(stats.span for stats in moved)
    exposed = sum(stats.exposed for stats in moved)
    hidden = f", {100 * (1 - exposed / span):.0f} % of the transfer hidden" if span else ""
    drafts = sum(completion.num_drafts for completion in completions)
    accepted = sum(completion.num_accepted for completion in completions)
    guessed = f", {100 * accepted / drafts:.0f} % of {drafts} guesses accepted" if drafts else ""
    return (
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s), {first},"
        f" {sum(stats.bytes for stats in moved) / 1e6:.2f} MB moved in"
        f" {sum(stats.writes for stats in moved)} writes{hidden}{guessed}"
    )
