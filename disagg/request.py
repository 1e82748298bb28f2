"""What a client asks for, and how a request can end.

Frozen data. How far a request has come is the engine's business (`engine/sequence.py`); how its
KV travels is the messenger's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Why a request's tokens ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How output tokens are chosen and when they stop. Greedy for now."""

    max_tokens: int = 128
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
