"""The answer to one request as its client holds it: tokens and text as they come, the end, JSON.

    engine --put--> news --wait, result--> tokens --TextStream, visible--> text
      ^-------------- cancel -------------- a stop string was found ---------'

Neither the engine nor its thread knows of text. Answers that share their news are all read by
whoever waits for one of them, also those that are shown later, so that a stop string soon gives the
pages back. Of a stop string no part is ever shown:

    stop "END"      the text so far   "the E"   "the EN"   "the ENemy EN"   "the ENemy END of"
                    visible           "the "    "the "     "the ENemy "     "the ENemy ", stopped
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from disagg.request import FinishReason, Output, Request, Timings, TokenLogprobs
from disagg.serve.tokenizer import TextStream

#: Outputs of one answer or of several that the engine delivered and no `wait` has taken in yet.
News = queue.SimpleQueue[tuple["Answer", Output]]


class Answer:
    """Made by `Node.submit`. One thread makes and reads it and all answers that share its `news`;
    `cancel` may be called from any: it stops the request's work on both nodes, once `submit` has
    set it.

    `text` is what is certain so far, if there is a `stream` to make it; it never gets shorter. A
    stop string in it ends the answer as STOP with the token that completes it, however far the
    engine had come. `completion` is the last output, with the tokens of all of them; its `timings`
    are None if the request never came to the engine.
    """

    def __init__(
        self, request: Request, *, stream: TextStream | None = None, news: News | None = None
    ) -> None:
        self.request = request
        self.cancel: Callable[[], None] = lambda: None
        self.text = ""
        self.completion: Output | None = None
        self._stream = stream
        self._whole_text, self._stopped = "", False
        self._news = queue.SimpleQueue() if news is None else news
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_taken = 0

    def put(self, output: Output) -> None:
        """From the engine: more tokens, and the end with the last of them."""
        self._news.put((self, output))

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the end. `queue.Empty` if `timeout` seconds bring no output."""
        while self.completion is None:
            self.wait(timeout)
        return self.completion

    def wait(self, timeout: float | None = None) -> None:
        """Take in the next of its news, which may be another's. `queue.Empty` if `timeout` seconds
        bring none."""
        answer, output = self._news.get(timeout=timeout)
        answer._take_in(output)

    def take(self) -> str:
        """The text that became certain since the last `take`."""
        taken = self.text[self._num_taken :]
        self._num_taken = len(self.text)
        return taken

    def _take_in(self, output: Output) -> None:
        for index, token_id in enumerate(output.token_ids):
            if not self._stopped:
                self._token_ids.append(token_id)
                self._logprobs += output.logprobs[index : index + 1]  # none if not asked for
                self._show(self._stream.push(token_id) if self._stream else "")
        if output.finish_reason is not None:
            if not self._stopped:
                self._show(self._stream.finish() if self._stream else "")
            if self._stopped:
                output = replace(output, finish_reason=FinishReason.STOP, error=None)
            else:  # nothing follows that could make a stop string of what was held back
                self.text = self._whole_text
            tokens, logprobs = tuple(self._token_ids), tuple(self._logprobs)
            self.completion = replace(output, token_ids=tokens, logprobs=logprobs)

    def _show(self, text: str) -> None:
        self._whole_text += text
        self.text, self._stopped = visible(self._whole_text, self.request.sampling.stop)
        if self._stopped:
            self.cancel()


def visible(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """What may be shown of a text that goes on, and whether a stop string was found in it.

    What could be the beginning of a stop string is held back, and shown when it turns out not to
    be. Where two are found, the one that is complete first ends the text; of two that end at the
    same character, the longer one. So what is shown does not depend on how the text came in pieces.
    """
    starts = [(text.find(string), string) for string in stop if string in text]
    if starts:
        _, start = min((start + len(string), start) for start, string in starts)
        return text[:start], True
    beginnings = (string[:count] for string in stop for count in range(1, len(string)))
    num_held = max((len(start) for start in beginnings if text.endswith(start)), default=0)
    return text[: len(text) - num_held], False


def as_json(index: int, answer: Answer) -> dict[str, Any]:
    """What `--json` prints of prompt number `index`, which is answered. Times as in
    `request.Timings`, in ms."""
    done = answer.result()
    moved = done.transfer and asdict(done.transfer)
    found: dict[str, Any] = {
        "index": index,
        "token_ids": done.token_ids,
        "text": answer.text,
        "finish_reason": done.finish_reason,
        "usage": {
            "prompt_tokens": len(answer.request.prompt_token_ids),
            "completion_tokens": len(done.token_ids),
        },
        "timings_ms": done.timings and _milliseconds(done.timings),
        # `exposed` is in timings_ms, `span` explains it.
        "transfer": moved and {n: x for n, x in moved.items() if n not in ("exposed", "span")},
    }
    if done.num_drafts:
        found["speculation"] = {"drafts": done.num_drafts, "accepted": done.num_accepted}
    if answer.request.sampling.logprobs is not None:
        found["logprobs"] = [*map(_logprobs, done.token_ids, done.logprobs)]
    if done.error is not None:
        found["error"] = done.error
    return found


def _milliseconds(timings: Timings) -> dict[str, float | None]:
    return {
        name.replace("first_token", "ttft"): value and round(1000 * value, 3)
        for name, value in asdict(timings).items()
    }


def _logprobs(token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": other, "logprob": logprob} for other, logprob in logprobs.top]
    return {"token_id": token_id, "logprob": logprobs.logprob, "top": top}
