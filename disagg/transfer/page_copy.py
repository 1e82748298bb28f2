"""Copy many pages between two regions of memory, in this process, on one CPU thread.

source       | . | 2 | . | 0 | 1 |     source_offsets       [3, 4, 1] * page_bytes
                   |       |   |
destination  | 1 | . | 0 | . | 2 |     destination_offsets  [2, 0, 4] * page_bytes
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from disagg.kv_layout import Offsets

Bytes = npt.NDArray[np.uint8]

#: numpy gathers into a temporary and scatters from it; this much stays in the cache.
GATHER_BYTES = 1 << 20


def copy_pages(
    destination: Bytes,
    source: Bytes,
    page_bytes: int,
    destination_offsets: Offsets,
    source_offsets: Offsets,
) -> None:
    """Copy `page_bytes` for each pair of offsets, all of which lie inside the regions.

    Offsets that are whole pages take the fast path: a page is one element, so that numpy moves many
    in one call and gives up Python's lock once; the simple path takes the lock back for each page.
    """
    offsets = (source_offsets, destination_offsets)
    if len(source_offsets) > 1 and not any((some % page_bytes).any() for some in offsets):
        _copy_elements(
            _as_pages(destination, page_bytes),
            _as_pages(source, page_bytes),
            destination_offsets // page_bytes,
            source_offsets // page_bytes,
        )
        return
    for start, to in zip(source_offsets.tolist(), destination_offsets.tolist(), strict=True):
        destination[to : to + page_bytes] = source[start : start + page_bytes]


def _copy_elements(
    destination: npt.NDArray[np.void],
    source: npt.NDArray[np.void],
    destination_indices: Offsets,
    source_indices: Offsets,
) -> None:
    step = max(1, GATHER_BYTES // source.itemsize)
    for first in range(0, len(source_indices), step):
        some = slice(first, first + step)
        destination[destination_indices[some]] = source[source_indices[some]]


def _as_pages(region: Bytes, page_bytes: int) -> npt.NDArray[np.void]:
    whole = region.nbytes // page_bytes * page_bytes
    return region[:whole].view(np.dtype((np.void, page_bytes)))
