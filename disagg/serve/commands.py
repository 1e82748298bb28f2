"""What the two launch scripts do once torch is loaded: build a node, serve or answer, print.

Standard output carries results only; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import Any

from disagg.messenger.prefillers import Address
from disagg.model.weights import default_dtype
from disagg.request import FinishReason, Request, SamplingParams
from disagg.serve.child_prefiller import LISTENING, ChildPrefiller
from disagg.serve.default_model import resolve_model
from disagg.serve.exits import EXIT_DONE, EXIT_FAILED, UsageError
from disagg.serve.handle import Completion, RequestHandle
from disagg.serve.node import Node, NodeConfig, NodeError
from disagg.serve.options import forwarded_flags, node_settings
from disagg.serve.tokenizer import Tokenizer
from disagg.transfer.interface import TransferError


def serve_prefill(arguments: argparse.Namespace) -> int:
    """Listen until interrupted; the exit code."""
    arguments = _resolve(arguments)
    with _start(arguments, listen=arguments.listen) as node:
        assert node.address is not None, "a prefiller listens"
        host, port = node.address
        print(f"{LISTENING}{host}:{port}", flush=True)
        try:
            node.wait()
        except NodeError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_FAILED
    return EXIT_DONE


def answer_prompts(arguments: argparse.Namespace) -> int:
    """Answer every prompt of the command line, in order; the exit code."""
    arguments = _resolve(arguments)
    with ExitStack() as stack:
        prefillers = arguments.prefill
        if not prefillers and not arguments.colocated:
            child = ChildPrefiller(forwarded_flags(arguments))
            prefillers = (stack.enter_context(child).address(),)
        tokenizer = Tokenizer(arguments.model)
        if not tokenizer.exists:
            raise UsageError(f"{arguments.model} has no tokenizer.json, so it reads no prompt")
        node = stack.enter_context(_start(arguments, prefillers=prefillers))
        answers = [_submit(node, tokenizer, prompt, arguments) for prompt in arguments.prompts]
        outcomes = [
            _print_answer(index, answer, tokenizer, arguments)
            for index, answer in enumerate(answers)
        ]
    return EXIT_DONE if all(outcomes) else EXIT_FAILED


def _resolve(arguments: argparse.Namespace) -> argparse.Namespace:
    """The flags with the model's folder and the dtype that `auto` means on this CPU."""
    try:
        folder = resolve_model(arguments.model)
    except ValueError as error:
        raise UsageError(str(error)) from error
    dtype = default_dtype() if arguments.dtype == "auto" else arguments.dtype
    return argparse.Namespace(**{**vars(arguments), "model": folder, "dtype": dtype})


def _start(
    arguments: argparse.Namespace,
    *,
    listen: Address | None = None,
    prefillers: tuple[Address, ...] = (),
) -> Node:
    cache, scheduler, messenger = node_settings(arguments)
    config = NodeConfig(
        model=arguments.model,
        cache=cache,
        scheduler=scheduler,
        messenger=messenger,
        listen=listen,
        prefillers=prefillers,
        transport=arguments.transport,
    )
    try:
        return Node(config)
    except (ValueError, TransferError, NodeError) as error:
        raise UsageError(str(error)) from error


def _submit(
    node: Node, tokenizer: Tokenizer, prompt: str, arguments: argparse.Namespace
) -> RequestHandle | Completion:
    """The request's handle, or how it ended if it was refused."""
    try:
        token_ids = tokenizer.encode(prompt, chat=not arguments.raw and bool(prompt))
        sampling = SamplingParams(max_tokens=arguments.max_tokens)
        return node.submit(Request(prompt_token_ids=tuple(token_ids), sampling=sampling))
    except (ValueError, RuntimeError) as error:
        return Completion(token_ids=(), finish_reason=FinishReason.ERROR, error=str(error))


def _print_answer(
    index: int,
    answer: RequestHandle | Completion,
    tokenizer: Tokenizer,
    arguments: argparse.Namespace,
) -> bool:
    """Print one answer, as it comes unless JSON is wanted. Returns whether it succeeded."""
    stream = tokenizer.stream()
    pieces: list[str] = []
    if isinstance(answer, RequestHandle):
        for token_id in answer:
            pieces.append(stream.push(token_id))
            if not arguments.json:
                print(pieces[-1], end="", flush=True)
    pieces.append(stream.finish())
    completion = answer.result() if isinstance(answer, RequestHandle) else answer
    if arguments.json:
        print(json.dumps(_as_json(index, completion, "".join(pieces))), flush=True)
    else:
        print(pieces[-1], flush=True)
    if completion.error is not None:
        print(f"error: prompt {index}: {completion.error}", file=sys.stderr)
    return completion.error is None


def _as_json(index: int, completion: Completion, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": index,
        "token_ids": list(completion.token_ids),
        "text": text,
        "finish_reason": completion.finish_reason,
    }
    if completion.error is not None:
        found["error"] = completion.error
    return found
