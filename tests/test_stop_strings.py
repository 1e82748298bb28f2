"""Stop strings: in pieces of text, over tokens and characters, and what becomes of the request."""

from __future__ import annotations

import itertools
import queue
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from disagg.serve.answer import Answer, visible
from disagg.serve.tokenizer import REPLACEMENT, Tokenizer
from tests.balance import engine_balance
from tests.nodes import DEADLINE_SECONDS, HeldNode, Oracle, node_config, prompt_of, wait_until
from tests.test_tokenizer import save_byte_tokenizer
from tests.tiny_models import make_tiny_llama, save_word_tokenizer


def shown(pieces, *stop):
    """What each piece lets show, and the end; and whether it stopped."""
    text, seen, stopped, texts = "", "", False, []
    for piece in pieces:
        text += "" if stopped else piece
        now, stopped = visible(text, stop)
        assert now.startswith(seen), "something was taken back"
        texts.append(now.removeprefix(seen))
        seen = now
    return [*texts, "" if stopped else text.removeprefix(seen)], stopped


# --- Pieces of text ---


def test_a_stop_string_over_three_pieces_shows_no_part_of_itself():
    assert shown(["the E", "N", "D of"], "END") == (["the ", "", "", ""], True)


def test_what_turns_out_to_be_no_stop_string_is_shown():
    assert shown(["an EN", "emy", " E"], "END") == (["an ", "ENemy", " ", "E"], False)


def test_a_false_start_inside_a_stop_string():
    assert shown(["aab", "aab", "c!"], "aabaac") == (["", "aab", "aabc!", ""], False)
    assert shown(["aaba", "aba", "ac!"], "aabaac") == (["", "aab", "", ""], True)


def test_the_one_that_is_complete_first_ends_the_text_and_of_two_the_longer():
    for stop in (("bcd", "c"), ("c", "bcd")):
        assert shown(["abcde"], *stop) == (["ab", ""], True)
    for stop in (("abc", "bc"), ("bc", "abc")):
        assert shown(["xabcx"], *stop) == (["x", ""], True)
    assert shown(["ab", "X"], "abc", "bX") == (["", "a", ""], True)


def test_without_stop_strings_everything_is_shown_at_once():
    assert shown(["a", "", "bc"]) == (["a", "", "bc", ""], False)


def end_of(text, stop):
    """Where the text ends, by looking at all of it, one character more at a time."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return end - max(map(len, found))
    return None


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@example(pieces=["ab", "ab"], stop=["bab", "abb"])
def test_the_cut_does_not_depend_on_the_pieces_and_nothing_is_taken_back(pieces, stop):
    text = "".join(pieces)
    end = end_of(text, stop)
    texts, stopped = shown(pieces, *stop)
    assert "".join(texts) == text[:end]
    assert stopped == (end is not None)
    assert shown([text], *stop) == ([text[:end], ""], stopped) or not stopped
    so_far, visible = "", ""
    for piece, part in zip(pieces, texts, strict=False):
        so_far, visible = so_far + piece, visible + part
        longest = max(map(len, stop), default=1)
        assert stopped or len(so_far) - len(visible) < longest, "held back more than it must"


# --- Tokens of a request ---


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return Tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


class Scripted:
    """An answer whose tokens the test delivers."""

    def __init__(self, tokenizer, *stop):
        self.cancels = 0
        request = Request(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(stop=stop))
        self.answer = Answer(request, stream=tokenizer.stream())
        self.answer.cancel = self.on_cancel

    def on_cancel(self):
        self.cancels += 1

    def put(self, *token_ids, finish=None, error=None):
        logprobs = tuple(TokenLogprobs(logprob=-float(token), top=()) for token in token_ids)
        self.answer.put(
            Output(token_ids=token_ids, logprobs=logprobs, finish_reason=finish, error=error)
        )
        self.answer.wait()
        return self.answer.take()

    def end(self):
        completion = self.answer.completion
        assert completion is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        return completion.token_ids, completion.finish_reason


def test_characters_come_whole_and_an_invalid_byte_at_the_end(byte_tokenizer):
    scripted = Scripted(byte_tokenizer)
    parts = [scripted.put(byte) for byte in "ďa😀é".encode()]
    assert parts == ["", "ď", "a", "", "", "", "😀", "", "é"]
    assert scripted.put(0xF0, finish=FinishReason.LENGTH) == REPLACEMENT
    assert scripted.answer.text == "ďa😀é" + REPLACEMENT
    assert scripted.end() == ((*"ďa😀é".encode(), 0xF0), "length")
    assert scripted.cancels == 0


def test_a_stop_string_ends_the_request_after_the_token_that_completes_it(byte_tokenizer):
    scripted = Scripted(byte_tokenizer, "END")
    assert "".join(scripted.put(byte) for byte in b"an EN") == "an "
    assert scripted.put(*b"emy E") == "ENemy "
    assert scripted.put(ord("N")) == ""
    assert scripted.cancels == 0
    assert scripted.put(*b"D or") == ""
    assert scripted.cancels == 1
    assert scripted.answer.completion is None, "the engine has not said so yet"
    assert scripted.put(*b" later") == ""
    assert scripted.put(finish=FinishReason.CANCELLED) == ""
    assert scripted.end() == (tuple(b"an ENemy END"), "stop")
    assert scripted.answer.text == "an ENemy "


@pytest.mark.parametrize(
    ("finish", "error"), [("length", None), ("stop", None), ("error", "the node died")]
)
def test_a_stop_string_goes_before_an_end_that_crossed_it(byte_tokenizer, finish, error):
    scripted = Scripted(byte_tokenizer, "END")
    assert scripted.put(*b"a END b", finish=FinishReason(finish), error=error) == "a "
    assert scripted.end() == (tuple(b"a END"), "stop")
    assert scripted.answer.completion.error is None


def test_half_a_stop_string_is_shown_at_the_end(byte_tokenizer):
    for finish in (FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR):
        scripted = Scripted(byte_tokenizer, "END")
        assert scripted.put(*b"the EN") == "the "
        assert scripted.put(finish=finish, error="why") == "EN"
        assert scripted.end() == (tuple(b"the EN"), finish)
        assert scripted.answer.completion.error == "why"


def test_stop_strings_of_many_bytes_and_of_bytes_that_are_no_character(byte_tokenizer):
    scripted = Scripted(byte_tokenizer, "😀é")
    parts = [scripted.put(byte) for byte in "a😀b😀é!".encode()]
    assert "".join(parts) == "a😀b"
    scripted.put(finish=FinishReason.CANCELLED)
    assert scripted.end() == (tuple("a😀b😀é".encode()), "stop")
    scripted = Scripted(byte_tokenizer, REPLACEMENT)
    assert scripted.put(ord("a"), 0xF0) == "a"
    assert scripted.put(finish=FinishReason.LENGTH) == ""
    assert scripted.end() == ((ord("a"), 0xF0), "stop")


@settings(deadline=None, max_examples=60)
@given(
    text=st.text("aE😀N", max_size=8),
    stop=st.lists(st.text("aE😀N", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 40)),
)
def test_a_stream_joined_is_the_whole_text(byte_tokenizer, text, stop, cuts):
    token_ids = (*text.encode(), 0x80)
    at_once = Scripted(byte_tokenizer, *stop)
    at_once.put(*token_ids, finish=FinishReason.LENGTH)
    streamed, borders = Scripted(byte_tokenizer, *stop), sorted({0, *cuts, len(token_ids)})
    parts = [streamed.put(*token_ids[a:b]) for a, b in itertools.pairwise(borders)]
    parts.append(streamed.put(finish=FinishReason.LENGTH))
    assert "".join(parts) == streamed.answer.text == at_once.answer.text
    assert streamed.end() == at_once.end()
    assert at_once.answer.text == (text + REPLACEMENT)[: end_of(text + REPLACEMENT, stop)]


def test_answers_that_share_their_news_are_read_together():
    news = queue.SimpleQueue()
    request = Request(prompt_token_ids=(1,))
    first, second = Answer(request, news=news), Answer(request, news=news)
    for token in (5, 6):
        first.put(Output(token_ids=(token,)))
    second.put(Output(token_ids=(7,), finish_reason=FinishReason.LENGTH))
    first.put(Output(token_ids=(8,), finish_reason=FinishReason.LENGTH))
    first.wait(1)
    assert first._token_ids == [5]
    assert second.result(1).token_ids == (7,)
    assert first._token_ids == [5, 6]
    assert first.result(1).token_ids == (5, 6, 8)
    with pytest.raises(queue.Empty):
        first.wait(0.01)


# --- A node ---


def test_a_node_stops_work_and_gives_pages_back(tmp_path):
    """It may compute a step only when the reader lets it, so that what is too much can be counted.
    Words are `t0` to `t127`, and tokens."""
    folder = save_word_tokenizer(make_tiny_llama(tmp_path))
    expected = Oracle(folder)(prompt_of(9), 8)
    words = [f"t{token}" for token in expected]
    stop = f"{words[5][-1]} {words[6]}"  # over a border
    permits = threading.Semaphore(0)

    steps = []

    def before_layer(layer):
        steps.append(layer)
        if layer == 0:
            assert permits.acquire(timeout=DEADLINE_SECONDS)

    with HeldNode(node_config(folder), before_layer=before_layer) as node:
        start = engine_balance(node._engine)
        wish = SamplingParams(max_tokens=300, stop=(stop,))
        answer = node.submit(
            Request(prompt_token_ids=prompt_of(9), sampling=wish),
            stream=Tokenizer(folder).stream(),
        )
        while answer.completion is None:
            permits.release()
            answer.wait(DEADLINE_SECONDS)
        assert answer.text == " ".join(words[:6])[:-1]
        assert answer.completion.token_ids == expected[:7]
        assert answer.completion.finish_reason is FinishReason.STOP
        assert steps.count(0) <= 8
        wait_until(lambda: engine_balance(node._engine) == start)
