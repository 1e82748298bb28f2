"""What an engine has free and open, to be compared before and after."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Balance:
    """All back at their start values when nothing is going on."""

    free_pages: int
    free_tail_slots: int
    open_requests: int
    open_jobs: int
    open_attempts: int


def engine_balance(engine: Engine) -> Balance:
    """A look from any thread; exact when nothing is going on.

    What a request owns is freed before its last output is delivered, but for the pages of a
    cancelled or failed attempt: they come back when nothing can land in them any more.
    """
    attempts = engine._attempts
    return Balance(
        free_pages=engine._scheduler.pages.num_free,
        free_tail_slots=engine._scheduler.slots.num_free,
        open_requests=len(engine._open),
        open_jobs=sum(s.is_job for s in (*engine._scheduler.waiting, *engine._scheduler.running)),
        open_attempts=len(attempts._owners),
    )
