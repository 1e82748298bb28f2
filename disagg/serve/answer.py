"""One answer as text: a request's tokens decoded as they come, up to the first stop string.

    engine --tokens--> RequestHandle --read()--> TextStream --> StopStrings --> text to show
      ^---- cancel ---------- stop(n) <------------------------ found after n tokens

Neither the engine nor its thread knows of text. Whoever waits for answers reads each of them when
it has news, also one that is shown later, so that a stop string soon gives the pages back.
"""

from __future__ import annotations

from disagg.request import SamplingParams
from disagg.serve.handle import Completion, RequestHandle
from disagg.serve.stop_strings import StopStrings
from disagg.serve.tokenizer import TextStream


class Answer:
    """See the module. `text` is all that is certain so far; it never gets shorter."""

    def __init__(self, handle: RequestHandle, stream: TextStream, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self._handle = handle
        self._stream = stream
        self._stop_strings = StopStrings(sampling.stop)
        self._num_tokens = 0
        self._num_taken = 0
        self.text = ""
        self.completion: Completion | None = None

    def read(self) -> None:
        """Take in what has come, without waiting; sets `completion` with the end."""
        for token_id in self._handle.read():
            if not self._stop_strings.stopped:
                self._num_tokens += 1
                self._show(self._stream.push(token_id))
        if self.completion is None and self._handle.completion is not None:
            if not self._stop_strings.stopped:
                self._show(self._stream.finish())
                self.text += self._stop_strings.finish()
            self.completion = self._handle.completion

    def take(self) -> str:
        """The text that became certain since the last `take`."""
        taken = self.text[self._num_taken :]
        self._num_taken = len(self.text)
        return taken

    def _show(self, text: str) -> None:
        self.text += self._stop_strings.push(text)
        if self._stop_strings.stopped:
            self._handle.stop(self._num_tokens)
