"""Text to token ids and back, for a model folder that has a tokenizer.

A thin layer over transformers' fast tokenizer. What it adds is streaming: text is handed out as
soon as it is certain, and a character whose bytes are spread over several tokens never half.

    tokens pushed   "Hi"   F0 9F    98 80    E2        (end)
    text returned   "Hi"   ""       "😀"     ""        finish() -> "\ufffd", E2 was never completed
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

#: What a tokenizer shows for bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"


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
            raise ValueError("it has no chat template; give the prompt as plain text (--raw)")
        messages = [{"role": "user", "content": prompt}]
        text = self._inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # The template has written the begin token already, if the model wants one.
        return list(self._inner.encode(text, add_special_tokens=False))

    def stream(self) -> TextStream:
        """A fresh decoder for one answer."""
        return TextStream(self._inner)


def vocabulary(folder: Path) -> dict[str, int] | None:
    """Number of each token; None if the folder has no tokenizer. ValueError if it is damaged."""
    path = folder / "tokenizer.json"
    try:
        return FastTokenizer.from_file(str(path)).get_vocab() if path.exists() else None
    except Exception as error:  # the library raises no other kind
        raise ValueError(f"{path} is damaged: {error}") from error


class TextStream:
    """Decodes one answer token by token. Special tokens show no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        #: Tokens whose text is not returned yet, and those right before them. They are decoded
        #: together: some tokenizers drop a space in front of the first word they see.
        self._waiting: list[int] = []
        self._before: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, perhaps empty."""
        self._waiting.append(token_id)
        whole = self._decode(self._before + self._waiting)
        return "" if whole.endswith(REPLACEMENT) else self.finish()

    def finish(self) -> str:
        """What was held back, as replacement characters."""
        text = self._decode(self._before + self._waiting)[len(self._decode(self._before)) :]
        self._before, self._waiting = self._waiting, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
