"""A submitted request as its client holds it: its tokens, how it ended, ways to end it early."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from disagg.request import FinishReason, Output, TokenLogprobs


def nothing() -> None:
    """For a handle that nobody waits for news of, or whose request cannot be cancelled."""


@dataclass(frozen=True, kw_only=True)
class Completion(Output):
    """How a request ended: its last output, with the tokens of all of them, a stop token too.
    `timings` is None if it never came to the engine, `transfer` if its KV was computed where it was
    decoded."""

    num_prompt_tokens: int


class RequestHandle:
    """Made by `Node.submit`. One thread reads it; `cancel` may be called from any.

    `on_news` is called in the engine's thread whenever there is something to `read`.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        *,
        cancel: Callable[[], None] = nothing,
        on_news: Callable[[], None] = nothing,
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._cancel = cancel
        self._on_news = on_news
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end: Output | None = None
        self._num_kept: int | None = None

    def __iter__(self) -> Iterator[int]:
        """Token ids as they are sampled, until the request ends."""
        while self._end is None:
            yield from self._take(self._outputs.get())

    def read(self) -> list[int]:
        """The token ids that have come since they were last asked for, without waiting."""
        token_ids: list[int] = []
        while self._end is None:
            try:
                token_ids += self._take(self._outputs.get_nowait())
            except queue.Empty:
                break
        return token_ids

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. TimeoutError if it does not come within `timeout` seconds an output."""
        while (completion := self.completion) is None:
            try:
                self._take(self._outputs.get(timeout=timeout))
            except queue.Empty:
                raise TimeoutError(f"no output within {timeout} s") from None
        return completion

    @property
    def completion(self) -> Completion | None:
        """How it ended, once that has been read."""
        if self._end is None:
            return None
        end = self._end
        if self._num_kept is not None:
            end = replace(end, finish_reason=FinishReason.STOP, error=None)
        found = {
            "token_ids": tuple(self._token_ids[: self._num_kept]),
            "logprobs": tuple(self._logprobs[: self._num_kept]),
        }
        return Completion(num_prompt_tokens=self._num_prompt_tokens, **(vars(end) | found))

    def cancel(self) -> None:
        """Stop the request's work on both nodes. A finished one is left alone."""
        self._cancel()

    def stop(self, num_tokens: int) -> None:
        """Its reader has found an end in the first `num_tokens` tokens: nothing after them counts.

        The request then ends as STOP, however far the engine had come; it is told to stop work.
        """
        assert num_tokens <= len(self._token_ids), f"stopped at {num_tokens}, which are not read"
        self._num_kept = num_tokens
        self._cancel()

    def put(self, output: Output) -> None:
        """From the engine: more tokens, and the end with the last of them."""
        self._outputs.put(output)
        self._on_news()

    def _take(self, output: Output) -> tuple[int, ...]:
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        if output.finish_reason is not None:
            self._end = output
        return output.token_ids if self._num_kept is None else ()
