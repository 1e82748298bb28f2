"""Copy many pages between two regions of memory, in this process, on one CPU thread.

    source       | . | 2 | . | 0 | 1 |     source_offsets       [3, 4, 1] * page_bytes
                       |       |   |
    destination  | 1 | . | 0 | . | 2 |     destination_offsets  [2, 0, 4] * page_bytes

The constants are the best of those tried with `tests/bench/bench_shm.py` (AMD EPYC, 2 cores).
"""

import numpy as np
import numpy.typing as npt

from disagg.kv_layout import Offsets
from disagg.transfer.medium import Bytes

#: Pages below this are copied many in one numpy call, which costs a copy more; others one by one.
SMALL_PAGE_BYTES = 4 << 10
#: Copied between two touches. A numpy call's temporary of this size stays in the cache.
STEP_BYTES = 256 << 10


def copy_pages(
    destination: Bytes,
    source: Bytes,
    page_bytes: int,
    destination_offsets: Offsets,
    source_offsets: Offsets,
) -> None:
    """Copy `page_bytes` for each pair of offsets, all of which lie inside the regions.

    Small pages take the fast path if their offsets are whole pages: there a page is one element, so
    that numpy gathers and scatters many in one call. The other path keeps Python's lock: callers
    bound how much they copy at once.
    """
    offsets = (source_offsets, destination_offsets)
    as_elements = page_bytes < SMALL_PAGE_BYTES and not any((o % page_bytes).any() for o in offsets)
    step = max(1, STEP_BYTES // page_bytes)
    from_view, to_view = source.data, destination.data  # quicker to slice than numpy
    for first in range(0, len(source_offsets), step):
        starts, ends = (o[first : first + step] for o in offsets)
        # One byte of each page, all at once: the cache and page-table misses that every page starts
        # with overlap here, instead of stopping the copy once for each page.
        _ = source[starts], destination[ends]
        if as_elements:
            sources, destinations = (_as_pages(r, page_bytes) for r in (source, destination))
            destinations[ends // page_bytes] = sources[starts // page_bytes]
            continue
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            to_view[end : end + page_bytes] = from_view[start : start + page_bytes]


def _as_pages(region: Bytes, page_bytes: int) -> npt.NDArray[np.void]:
    whole = region.nbytes // page_bytes * page_bytes
    return region[:whole].view(np.dtype((np.void, page_bytes)))
