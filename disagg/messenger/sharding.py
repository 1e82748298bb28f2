"""Which bytes of a page go from which rank to which rank: pure integers, no I/O but `main`.

    whole page   [rows, heads, bytes of a head]     a rank holds an interval of the heads, all rows

    6 heads      |  0  |  1  |  2  |  3  |  4  |  5  |
    3 prefill    |  rank 0   |  rank 1   |  rank 2   |     a slice: the heads that two ranks share
    2 decode     |     rank 0      |     rank 1      |     0->0: 0 1, 1->0: 2, 1->1: 3, 2->1: 4 5

In HND a page has one row, so a slice is one write. In NHD it has a row for each of K and V of each
token, and a slice is as many writes, or one if both ranks hold just its heads. With MLA (attention
over one latent vector a token) it has one row and one head, which all ranks hold. Neighbouring
pages never become one write: the decoder could not know how many writes that makes.

Both sides use this file: the prefiller for what it writes, the decoder for what it counts.
`python -m disagg.messenger.sharding --prefill-tp 8 --decode-tp 4` explains a pair.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from disagg.kv_layout import Offsets, PageOrder, heads_of_rank, pages_for

#: One page of one layer of the whole model in bytes: `[rows, heads, bytes of a head in a row]`.
Page = tuple[int, int, int]

#: Published Gbit/s of paged writes of these sizes in bytes, where each rank has such NICs.
SIZES = (1 << 10, 1 << 13, 1 << 16)
PUBLISHED = (("ConnectX-7 (400G)", (91, 320, 370)), ("EFA (2x200G)", (17, 138, 364)))


class Slice(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The heads that two ranks share: runs of `nbytes` each, contiguous in both ranks' pages.

    The offsets say where the runs begin in either rank's page, in bytes: int64 `[num_runs]`.
    """

    source_rank: int
    destination_rank: int
    source_offsets: Offsets
    destination_offsets: Offsets
    nbytes: int

    def offsets(self, sources: Offsets, destinations: Offsets) -> tuple[Offsets, Offsets]:
        """All runs of pages that begin there, on both sides: int64 `[num_pages * num_runs]`."""
        src = sources[:, None] + self.source_offsets
        dst = destinations[:, None] + self.destination_offsets
        return src.ravel(), dst.ravel()


def page_of(
    order: str, page_size: int, num_kv_heads: int, vector_bytes: int, num_vectors: int = 2
) -> Page:
    """A page for all heads of the model, each with `num_vectors` of `vector_bytes` a token."""
    rows = 1 if order == PageOrder.HND else num_vectors * page_size
    return rows, num_kv_heads, num_vectors * page_size * vector_bytes // rows


def make_plan(page: Page, source_tp: int, destination_tp: int) -> tuple[tuple[Slice, ...], ...]:
    """The replica sets of a pair of nodes, made once for each peer: each is slices that together
    fill a page on every destination rank. There is more than one if source ranks hold the same.

    Any of the sets will do. One drawn for each request keeps all NICs busy, and the count does not
    depend on the draw. ValueError if these ranks cannot share the heads of the page.
    """
    rows, num_heads, head_bytes = page
    num_replicas = max(1, source_tp // num_heads)
    plan: list[list[Slice]] = [[] for _ in range(num_replicas)]
    for d in range(destination_tp):
        there = heads_of_rank(num_heads, destination_tp, d)
        for s in range(source_tp):
            here = heads_of_rank(num_heads, source_tp, s)
            first, end = max(here.start, there.start), min(here.stop, there.stop)
            if first >= end:
                continue
            rows_in_run = rows if end - first == len(here) == len(there) else 1
            row = np.arange(rows // rows_in_run)
            shared = Slice(
                source_rank=s,
                destination_rank=d,
                source_offsets=(row * len(here) + first - here.start) * head_bytes,
                destination_offsets=(row * len(there) + first - there.start) * head_bytes,
                nbytes=rows_in_run * (end - first) * head_bytes,
            )
            # Neighbouring ranks hold the same; in one set, destinations take turns among them.
            plan[(s - d) % num_replicas].append(shared)
    return tuple(map(tuple, plan))


def expected_count(num_sent_pages: int, kinds: Iterable[tuple[int, Sequence[Slice]]]) -> int:
    """Immediates of an attempt: each run of each sent page of each layer is a write, and the tail
    is one. `kinds` are layers, how many and by which slices."""
    return num_sent_pages * sum(n * len(s.source_offsets) for n, each in kinds for s in each) + 1


# --- For people ---


def write_ns(nbytes: int, gbits: Sequence[float]) -> float:
    """Nanoseconds that one of many writes takes, from the rates at `SIZES`. Smaller ones take as
    long as the smallest, larger ones have the rate of the largest."""
    known = [8 * size / rate for size, rate in zip(SIZES, gbits, strict=True)]
    return float(np.interp(nbytes, SIZES, known)) * max(1.0, nbytes / SIZES[-1])


def explain(page: Page, tp: tuple[int, int], num_layers: int, num_pages: int) -> Iterator[str]:
    """Who writes which bytes where, in how many writes, and how long they take."""
    slices, *others = make_plan(page, *tp)
    yield "page      {} bytes in each layer: rows {}, heads {}".format(np.prod(page), *page)
    for s in slices:
        runs = f"{len(s.source_offsets)} x {s.nbytes} bytes"
        where = f"from {s.source_offsets} to {s.destination_offsets}"
        yield f"slice     prefill {s.source_rank} -> decode {s.destination_rank}: {runs} {where}"
    yield f"draws     {1 + len(others)}: replica sets like this one, one drawn for each request"
    yield f"writes    {expected_count(1, [(1, slices)]) - 1} for each page of each layer"
    count = expected_count(num_pages, [(num_layers, slices)])
    yield f"expected  {count}: {num_layers} layers of {num_pages} pages, and the tail"
    for nics, gbits in PUBLISHED:
        busy: Counter[str] = Counter()
        for s in slices:
            ns = num_layers * num_pages * len(s.source_offsets) * round(write_ns(s.nbytes, gbits))
            busy.update({f"prefill {s.source_rank}": ns, f"decode {s.destination_rank}": ns})
        [(rank, ns)] = busy.most_common(1)
        yield f"time      {ns / 1e6:.2f} ms at published rates of {nics}: {rank} is busiest"


def main(arguments: Sequence[str] | None = None) -> None:
    """Explain the pair that the command line describes. An MLA latent of n elements is one head of
    n / 2, for K and V count as two."""
    parser = argparse.ArgumentParser(description="Which bytes of a KV page go where.")
    model = {"heads": 8, "head-dim": 128, "page-size": 16, "layers": 94, "tokens": 4096}
    for name, default in (model | {"prefill-tp": 8, "decode-tp": 4}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layout", choices=[*PageOrder], default=PageOrder.HND)
    given = parser.parse_args(arguments)
    if min(value for value in vars(given).values() if isinstance(value, int)) < 1:
        parser.error("expected numbers of at least 1")
    page = page_of(given.layout, given.page_size, given.heads, 2 * given.head_dim)  # bfloat16
    tp = given.prefill_tp, given.decode_tp
    num_pages = pages_for(given.tokens - 1, given.page_size)
    try:
        with np.printoptions(threshold=4, edgeitems=2):
            print(*explain(page, tp, given.layers, num_pages), sep="\n")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
