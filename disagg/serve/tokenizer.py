"""Text to token ids and back, for a model folder that has a tokenizer.

A thin layer over transformers' fast tokenizer. What it adds is streaming: text is handed out as
soon as it is certain, and a character whose bytes are spread over several tokens never half.

    tokens pushed   "Hi"   F0 9F    98 80    E2        (end)
    text returned   "Hi"   ""       "😀"     ""        finish() -> "\ufffd", E2 was never completed
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

#: What a tokenizer shows for bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"

#: A UTF-8 character has at most four bytes, so at most three tokens wait for the rest of one.
#: Tokenizers show them as one replacement character, or as one for each byte.
MAX_UNFINISHED = 3


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        """Load `folder/tokenizer.json`; ValueError if there is none."""
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{folder} has no tokenizer.json, so it reads no prompt")
        self._inner: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """Token ids of `prompt`: as it is, or as a user's message in the model's chat template."""
        if not chat:
            return list(self._inner.encode(prompt))
        if self._inner.chat_template is None:
            raise ValueError(
                "the model has no chat template; give the prompt as plain text (--raw)"
            )
        messages = [{"role": "user", "content": prompt}]
        text = self._inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # The template has written the begin token already, if the model wants one.
        return list(self._inner.encode(text, add_special_tokens=False))

    def stream(self) -> TextStream:
        """A fresh decoder for one answer."""
        return TextStream(self._inner)


class TextStream:
    """Decodes one answer token by token. Special tokens show no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        # Tokens are decoded after those that ended the text returned so far, which are whole
        # characters: some tokenizers drop a space in front of the first word they see.
        self._window: list[int] = []
        self._num_before = 0  # tokens of the window
        self._num_returned = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, perhaps empty."""
        self._window.append(token_id)
        text = self._text()
        num_unfinished = len(text) - len(text.rstrip(REPLACEMENT))
        if num_unfinished and len(self._window) - self._num_before <= MAX_UNFINISHED:
            return ""
        return self._take(text, len(text) - min(num_unfinished, MAX_UNFINISHED))

    def finish(self) -> str:
        """What was held back, as replacement characters."""
        text = self._text()
        return self._take(text, len(text))

    def _take(self, text: str, end: int) -> str:
        taken = text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        if end == len(text):
            del self._window[: self._num_before]
            self._num_before = len(self._window)
            self._num_returned = len(self._text())
        return taken

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))
