"""A submitted request as its client holds it: its tokens, how it ended, a way to cancel it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class Completion:
    """How a request ended. `token_ids` holds all output tokens, a stop token too; `error` says why
    if `finish_reason` is ERROR."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None


@dataclass(frozen=True, kw_only=True)
class _Output:
    token_ids: list[int]
    finish_reason: FinishReason | None
    error: str | None


class RequestHandle:
    """Made by `Node.submit`. One thread reads it; `cancel` may be called from any."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._outputs: queue.SimpleQueue[_Output] = queue.SimpleQueue()
        self._token_ids: list[int] = []
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[int]:
        """Token ids as they are sampled, until the request ends."""
        while self._completion is None:
            yield from self._next(None)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. TimeoutError if it does not come within `timeout` seconds an output."""
        while self._completion is None:
            self._next(timeout)
        return self._completion

    def cancel(self) -> None:
        """Stop the request's work on both nodes. A finished one is left alone."""
        self._cancel()

    def put(
        self, token_ids: list[int], finish_reason: FinishReason | None, error: str | None
    ) -> None:
        """From the engine: more tokens, and the end with the last of them."""
        self._outputs.put(_Output(token_ids=token_ids, finish_reason=finish_reason, error=error))

    def _next(self, timeout: float | None) -> list[int]:
        try:
            output = self._outputs.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no output within {timeout} s") from None
        self._token_ids += output.token_ids
        if output.finish_reason is not None:
            self._completion = Completion(
                token_ids=tuple(self._token_ids),
                finish_reason=output.finish_reason,
                error=output.error,
            )
        return output.token_ids
