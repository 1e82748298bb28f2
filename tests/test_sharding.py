"""Slices of pages between ranks, held against pages whose every byte has a name.

whole[kv, token, head, byte] = a number of its own
a rank's page                = the heads it holds, in the order of its layout, flat
a plan is applied run by run to poisoned pages; then each must be what its rank should hold
"""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.kv_layout import PageOrder, heads_of_rank
from disagg.messenger.sharding import (
    PUBLISHED,
    SIZES,
    Slice,
    expected_count,
    main,
    make_plan,
    page_of,
    write_ns,
)

POISON = -1
README = (Path(__file__).parents[1] / "README.md").read_text()


def heads_held(num_heads: int, tp: int, rank: int) -> list[int]:
    """Those of which a rank's share of [0, 1) covers a part; told without sharding's formula."""
    return [
        head
        for head in range(num_heads)
        if rank * num_heads < (head + 1) * tp and head * tp < (rank + 1) * num_heads
    ]


def rank_pages(order: PageOrder, whole: np.ndarray, tp: int) -> list[np.ndarray]:
    """What each rank's page should hold, flat. `whole`: int `[2, page_size, heads, bytes]`."""
    shares = [whole[:, :, heads_held(whole.shape[2], tp, rank)] for rank in range(tp)]
    if order == PageOrder.HND:
        shares = [share.transpose(2, 0, 1, 3) for share in shares]
    return [share.ravel() for share in shares]


def check(slices: tuple[Slice, ...], source: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """Apply the slices run by run: each byte of each page once, and the right one."""
    pages = [np.full(len(page), POISON) for page in wanted]
    for s in slices:
        here, there = source[s.source_rank], pages[s.destination_rank]
        for src, dst in zip(s.source_offsets, s.destination_offsets, strict=True):
            assert 0 <= src <= len(here) - s.nbytes, "read outside the page"
            assert 0 <= dst <= len(there) - s.nbytes, "written outside the page"
            assert (there[dst : dst + s.nbytes] == POISON).all(), "written twice"
            there[dst : dst + s.nbytes] = here[src : src + s.nbytes]
    for found, expected in zip(pages, wanted, strict=True):
        assert (found == expected).all()


def num_writes(slices: tuple[Slice, ...]) -> int:
    return sum(len(s.source_offsets) for s in slices)


@settings(max_examples=500, deadline=None)
@given(
    order=st.sampled_from(PageOrder),
    page_size=st.integers(1, 5),
    num_heads=st.integers(1, 16),
    vector_bytes=st.integers(1, 3),
    prefill_tp=st.integers(1, 8),
    decode_tp=st.integers(1, 8),
)
def test_every_byte_comes_once_and_is_the_right_one(
    order: PageOrder,
    page_size: int,
    num_heads: int,
    vector_bytes: int,
    prefill_tp: int,
    decode_tp: int,
) -> None:
    page = page_of(order, page_size, num_heads, vector_bytes)
    wrong = [tp for tp in (prefill_tp, decode_tp) if num_heads % tp and tp % num_heads]
    if wrong:
        with pytest.raises(ValueError, match=rf"^{num_heads} KV heads .* ranks; .*multiple") as why:
            make_plan(page, prefill_tp, decode_tp)
        assert any(f"by {tp} ranks" in str(why.value) for tp in wrong)
        return
    whole = np.arange(2 * page_size * num_heads * vector_bytes)
    whole = whole.reshape(2, page_size, num_heads, vector_bytes)
    sources, wanted = (rank_pages(order, whole, tp) for tp in (prefill_tp, decode_tp))
    plan = make_plan(page, prefill_tp, decode_tp)
    assert len(plan) == max(1, prefill_tp // num_heads)
    assert len({num_writes(slices) for slices in plan}) == 1, "the count depends on the draw"
    for slices in plan:
        check(slices, sources, wanted)
    written = [0] * prefill_tp
    for s in (s for slices in plan for s in slices):
        written[s.source_rank] += s.nbytes * len(s.source_offsets)
    if prefill_tp >= num_heads:
        assert len(set(written)) == 1, f"over all draws the ranks write {written} bytes"


@given(prefill_tp=st.integers(1, 8), decode_tp=st.integers(1, 8), nbytes=st.integers(1, 50))
def test_mla_has_one_latent_for_all_ranks(prefill_tp: int, decode_tp: int, nbytes: int) -> None:
    latent = np.arange(nbytes)
    plan = make_plan((1, 1, nbytes), prefill_tp, decode_tp)
    assert len(plan) == prefill_tp
    for slices in plan:
        check(slices, [latent] * prefill_tp, [latent] * decode_tp)
        assert num_writes(slices) == decode_tp
        writers = {s.source_rank for s in slices}
        assert len(writers) == min(prefill_tp, decode_tp), "one rank writes while others are idle"


def test_three_to_two_ranks_with_six_heads() -> None:
    [slices] = make_plan(page_of("HND", 4, 6, 1), 3, 2)  # a head has 8 bytes
    assert [
        (
            *(s.source_rank, s.destination_rank),
            *(s.source_offsets.tolist(), s.destination_offsets.tolist(), s.nbytes),
        )
        for s in slices
    ] == [(0, 0, [0], [0], 16), (1, 0, [0], [16], 8), (1, 1, [8], [0], 8), (2, 1, [0], [8], 16)]


@pytest.mark.parametrize(
    ("heads", "prefill_tp", "decode_tp", "hnd", "nhd_rows"),
    [
        *((8, 1, 1, 1, 0), (8, 4, 4, 4, 0), (8, 8, 4, 8, 8), (8, 4, 8, 8, 8), (6, 3, 2, 4, 4)),
        *((2, 8, 8, 8, 0), (2, 8, 1, 2, 2), (2, 1, 8, 8, 8)),
    ],
)
def test_writes_of_hnd_do_not_grow_with_tokens(
    heads: int, prefill_tp: int, decode_tp: int, hnd: int, nhd_rows: int
) -> None:
    for page_size in (1, 16, 64):
        of_hnd, *_ = make_plan(page_of("HND", page_size, heads, 256), prefill_tp, decode_tp)
        of_nhd, *_ = make_plan(page_of("NHD", page_size, heads, 256), prefill_tp, decode_tp)
        assert num_writes(of_hnd) == len(of_hnd) == len(of_nhd) == hnd
        # A run for K and V of each token, but one where both ranks hold the same heads.
        assert num_writes(of_nhd) == (2 * page_size * nhd_rows or hnd)
        assert expected_count(256, [(94, of_hnd)]) == 94 * 256 * hnd + 1


def test_offsets_of_pages_are_those_of_each_run() -> None:
    [slices] = make_plan(page_of("NHD", 2, 2, 3), 1, 2)
    src, dst = slices[1].offsets(np.array([100, 700]), np.array([50, 20]))
    assert src.tolist() == [103, 109, 115, 121, 703, 709, 715, 721]
    assert dst.tolist() == [50, 53, 56, 59, 20, 23, 26, 29]


def test_heads_of_a_rank() -> None:
    assert [list(heads_of_rank(6, 3, rank)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(heads_of_rank(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    with pytest.raises(ValueError, match="6 KV heads cannot be shared by 4 ranks"):
        heads_of_rank(6, 4, 0)


# --- What it tells people ---


def test_time_of_a_write_is_as_published() -> None:
    for _, gbits in PUBLISHED:
        for size, rate in zip(SIZES, gbits, strict=True):
            assert write_ns(size, gbits) == pytest.approx(8 * size / rate)
        assert write_ns(16, gbits) == write_ns(SIZES[0], gbits), "small writes cost the same each"
        assert write_ns(4 * SIZES[-1], gbits) == pytest.approx(4 * write_ns(SIZES[-1], gbits))


def printed(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    main(arguments.split())
    return capsys.readouterr().out


def test_the_explanation_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "--heads 8 --head-dim 128 --page-size 16 --layers 94 --prefill-tp 8 --decode-tp 4"
    lines = printed(capsys, numbers).splitlines()
    head_bytes = 2 * 16 * 128 * 2
    assert lines[0] == f"page      {8 * head_bytes} bytes in each layer: rows 1, heads 8"
    assert lines[1:9] == [
        f"slice     prefill {rank} -> decode {rank // 2}: 1 x {head_bytes} bytes"
        f" from [0] to [{rank % 2 * head_bytes}]"
        for rank in range(8)
    ]
    assert re.fullmatch(r"draws     1: .*", lines[9])
    assert lines[10] == "writes    8 for each page of each layer"
    count = 94 * 256 * 8 + 1  # 4095 positions
    assert lines[11] == f"expected  {count}: 94 layers of 256 pages, and the tail"
    # Each decode rank takes two writes of 8 KiB a page and layer.
    for line, gbits in zip(lines[12:], (320, 138), strict=True):
        ms = 94 * 256 * 2 * (8 * head_bytes / gbits) / 1e6
        assert float(re.findall(r"time +(\S+) ms", line)[0]) == pytest.approx(ms, rel=5e-3)
        assert line.endswith("decode 0 is busiest")


def test_runs_and_replicas_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--heads 2 --head-dim 1 --page-size 2 --layout NHD --prefill-tp 4 --decode-tp 1"
    out = printed(capsys, small)
    assert "prefill 2 -> decode 0: 4 x 2 bytes from [0 2 4 6] to [ 2  6 10 14]" in out
    assert "draws     2:" in out and "writes    8 for" in out
    out = printed(
        capsys, "--heads 1 --head-dim 288 --prefill-tp 2 --decode-tp 3 --layers 61 --tokens 17"
    )
    assert f"page      {16 * 576 * 2} bytes" in out
    assert "draws     2:" in out and f"expected  {61 * 3 + 1}: 61 layers of 1 pages" in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--heads 6 --prefill-tp 4", "6 KV heads cannot be shared by 4 ranks"),
        ("--heads 6 --decode-tp 4", "6 KV heads cannot be shared by 4 ranks"),
        ("--page-size 0", "at least 1"),
        ("--decode-tp -2", "at least 1"),
        ("--layout HDN", "HND"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_the_table_of_the_readme_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) : (\d+) \| (.*) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) >= 5
    for heads, prefill_tp, decode_tp, *cells in rows:
        for layout, cell in zip(("HND", "NHD"), cells, strict=True):
            tps = f"--prefill-tp {prefill_tp} --decode-tp {decode_tp}"
            out = printed(capsys, f"--heads {heads} {tps} --layout {layout}")
            [writes] = re.findall(r"^writes +(\d+) for", out, re.MULTILINE)
            sizes = list(dict.fromkeys(re.findall(r" x (\d+) bytes", out)))
            ms = re.findall(r"^time +(\S+) ms", out, re.MULTILINE)
            assert cell == f"{writes} of {' and '.join(sizes)} B, {ms[0]} ms", (heads, tps, layout)
