"""Checks of a write's range, made before anything is posted; the same for every transport."""

from __future__ import annotations

import numpy as np

from disagg.kv_layout import Offsets
from disagg.transfer.interface import TransferError

#: An immediate is a u32.
MAX_IMM = 2**32 - 1


def check_pages(page_bytes: int, src_offsets: Offsets, dst_offsets: Offsets, imm: int) -> None:
    """What is wrong whatever the regions are. TransferError."""
    if not 0 <= imm <= MAX_IMM:
        raise TransferError(f"imm: expected 0 to {MAX_IMM}, got {imm}")
    if page_bytes < 1:
        raise TransferError(f"a write has at least 1 byte, got {page_bytes}")
    if len(src_offsets) != len(dst_offsets) or len(src_offsets) == 0:
        raise TransferError(
            "offsets: expected one destination for each source and at least one,"
            f" got {len(src_offsets)} sources and {len(dst_offsets)} destinations"
        )


def check_offsets(what: str, offsets: Offsets, page_bytes: int, region_bytes: int) -> None:
    """Every page lies inside the region, or TransferError names the first that does not."""
    wrong = np.flatnonzero((offsets < 0) | (offsets > region_bytes - page_bytes))
    if wrong.size:
        raise TransferError(
            f"{what} offset {offsets[wrong[0]]}: {page_bytes} bytes there leave the region of"
            f" {region_bytes} bytes; expected 0 to {region_bytes - page_bytes}. Nothing was written"
        )
