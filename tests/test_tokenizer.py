"""Text to tokens and back; above all, that streaming never shows half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from disagg.serve.tokenizer import REPLACEMENT, TextStream, Tokenizer

TEMPLATE = (
    "{% for m in messages %}<b>{{ m['role'] }}: {{ m['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<b>assistant: {% endif %}"
)


def save_byte_tokenizer(folder: Path, chat_template: str | None = TEMPLATE) -> Path:
    """A tokenizer whose tokens 0..255 are bytes, 256 `<b>` (put before plain text), 257 `<e>`."""
    alphabet = {
        byte: text
        for text in pre_tokenizers.ByteLevel.alphabet()
        if (byte := _byte_of(text)) is not None
    }
    vocab = {alphabet[byte]: byte for byte in range(256)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<b>", "<e>"])
    fast.post_processor = processors.TemplateProcessing("<b> $A", None, [("<b>", 256)])
    PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<b>", eos_token="<e>", chat_template=chat_template
    ).save_pretrained(folder)
    return folder


def _byte_of(text: str) -> int | None:
    """Which byte a character of the byte-level alphabet stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return ord(text) if ord(text) in plain else others[ord(text) - 256]


def save_byte_fallback_tokenizer(folder: Path) -> Path:
    """The other kind: words with a marked space, and `<0xNN>` for bytes without a token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581a": 256, "\u2581b": 257}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_byte_fallback_tokenizer(tmp_path_factory.mktemp("fallback")))


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Of a whole answer."""
    return "".join(pieces(tokenizer.stream(), token_ids))


def pieces(stream: TextStream, token_ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in token_ids), stream.finish()]


def test_plain_text_gets_what_the_tokenizer_puts_around_it(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode("a é", chat=False) == [256, *"a é".encode()]


def test_chat_is_the_template_and_nothing_more(byte_tokenizer: Tokenizer) -> None:
    expected = [256, *b"user: hi", 257, 256, *b"assistant: "]
    assert byte_tokenizer.encode("hi", chat=True) == expected


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_byte_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(ValueError, match="it has no chat template; give the prompt as plain text"):
        tokenizer.encode("hi", chat=True)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, so it reads no prompt"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["byte_tokenizer", "fallback_tokenizer"])
def test_characters_come_whole_and_an_invalid_tail_at_the_end(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    token_ids = [*"ďa😀é".encode(), 0xF0, 0x9F]
    got = pieces(tokenizer.stream(), token_ids)
    assert got[:-1] == ["", "ď", "a", "", "", "", "😀", "", "é", "", ""]
    assert set(got[-1]) == {REPLACEMENT}


def test_invalid_bytes_come_with_the_next_character(byte_tokenizer: Tokenizer) -> None:
    stream = byte_tokenizer.stream()
    shown = [stream.push(byte) for byte in (*"é".encode(), 0x80, 0xFF, *"xé".encode())]
    assert shown == ["", "é", "", "", 2 * REPLACEMENT + "x", "", "é"]
    assert stream.finish() == ""


def test_spaces_between_words_survive(fallback_tokenizer: Tokenizer) -> None:
    assert pieces(fallback_tokenizer.stream(), [256, 257, 257, 256]) == ["a", " b", " b", " a", ""]


def test_special_tokens_show_no_text(byte_tokenizer: Tokenizer) -> None:
    assert pieces(byte_tokenizer.stream(), [256, ord("x"), 257]) == ["", "x", "", ""]


def test_stream_of_nothing(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.stream().finish() == ""


@given(
    st.lists(st.integers(0, 257), max_size=40)
    | st.text(max_size=12).map(lambda t: list(t.encode()))
)
def test_joined_stream_is_the_whole_text(byte_tokenizer: Tokenizer, token_ids: list[int]) -> None:
    text = bytes(token for token in token_ids if token < 256).decode(errors="replace")
    stream = byte_tokenizer.stream()
    shown = ""
    for token_id in token_ids:
        shown += stream.push(token_id)
        assert text.startswith(shown)
    assert shown + stream.finish() == text
