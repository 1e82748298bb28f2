"""One replica: takes requests and prefill jobs from any thread, computes step by step in one.

One class, three uses. Undivided: it prefills all N prompt tokens and samples after the last.
Prefiller: jobs say what to compute, positions 0..N-2, and nothing is sampled. Decoder: positions
0..N-2 are filled by a prefiller and token N-1 runs as an ordinary decode token.

    any thread    submit, cancel, post ---> inbox
                                              |  drained between two steps, wakes the idle loop
    one thread    step(): drain -> admit (on_fetch) -> schedule -> on_step_scheduled(base, chunks)
                          -> run -> free -> on_output

Since the inbox is drained between steps only, no step that names a page is running when an event
frees it. A step that raises ends the engine: every counter base after it would be wrong.
Fetched pages, and what becomes of them when a fetch fails, are `attempts.py`.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from disagg import hooks
from disagg.engine.attempts import Attempts
from disagg.engine.drafter import Result
from disagg.engine.ranks import Ranks
from disagg.engine.runner import Runner
from disagg.engine.sampling import Sampled
from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import OnOutput, Sequence
from disagg.hooks import Span
from disagg.request import FinishReason, Output, Request
from disagg.trace import Trace

#: Why a request ends that would wait for a fence, which may never come.
HOPELESS = (
    "a prefiller hangs that may still write into pages and tail slots; those that are left cannot"
    " hold this request; let that process go on, or end it"
)


class Engine:
    """See the module. A prefiller's engine has `prefill_hooks`, a decoder's `decode_hooks` (it then
    fetches every prompt's KV), an undivided one neither. `runner` computes the steps: here, or in
    the processes of several ranks."""

    def __init__(
        self,
        runner: Runner | Ranks,
        scheduler: Scheduler,
        *,
        prefill_hooks: hooks.PrefillHooks | None = None,
        decode_hooks: hooks.DecodeHooks | None = None,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._trace = trace or Trace()
        self._prefill_hooks = prefill_hooks
        self._remote = decode_hooks is not None

        #: What the engine thread is to do between two steps.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Guards the next two: whoever submits either sees `_ended` or is answered when it is set.
        self._lock = threading.Lock()
        self._open: dict[int, Sequence] = {}
        self._ended: str | None = None
        self._numbers = itertools.count(1)

        # The engine thread's alone.
        self._attempts = Attempts(scheduler, decode_hooks)

    # From any thread

    def submit(self, request: Request, on_output: OnOutput) -> int:
        """Queue a request and return its number, by which `cancel` names it.

        ValueError if it can never be served, RuntimeError if the engine has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise RuntimeError(f"the engine takes no more requests: {self._ended}")
            number = next(self._numbers)
            sequence = self._scheduler.new_request(number, request, remote=self._remote)
            sequence.on_output = on_output
            sequence.stopwatch.reach("submitted", self._clock())
            self._open[number] = sequence
            self._inbox.put(partial(self._scheduler.add, sequence))
        return number

    def cancel(self, number: int) -> None:
        """Answer a request CANCELLED and stop its work; one unknown or finished is left alone."""
        self._inbox.put(partial(self._cancel, number))

    def post(self, event: hooks.EngineEvent) -> None:
        """Hand over an event of the messenger.

        ValueError for a `StartPrefill` that can never be computed here; nothing else is checked.
        """
        if isinstance(event, hooks.StartPrefill):
            job = self._scheduler.new_job(event.job, event.token_ids)
            self._inbox.put(partial(self._scheduler.add, job))
        else:
            self._inbox.put(partial(self._handle, event))

    def stop(self, why: str = "the engine was stopped") -> None:
        """After the step that is running: take no more requests, answer the open ones with the
        error `why`, end `run_forever`. May be called twice."""
        self._inbox.put(partial(self._end, why))

    # In the engine thread

    def run_forever(self) -> None:
        """Step until `stop`, sleeping while there is nothing to do. Raises what a step raised."""
        did_work = True
        while self._ended is None:
            did_work = self.step(wait=not did_work)

    def step(self, *, wait: bool = False) -> bool:
        """Drain the inbox, then run one step if any tokens can be computed.

        With `wait` sleeps until the inbox has something. Returns whether anything was done; if
        not, nothing can be done until something is submitted, cancelled or posted.
        RuntimeError if the engine has ended.
        """
        if self._ended is not None:
            raise RuntimeError(f"the engine runs no more steps: {self._ended}")
        try:
            drained = self._drain(wait)
            ran = self._ended is None and self._run_step()
        except BaseException as error:
            self._end(f"a step failed: {error!r}")
            raise
        return drained or ran

    def _drain(self, wait: bool) -> bool:
        drained = False
        while self._ended is None and ((wait and not drained) or not self._inbox.empty()):
            act = self._inbox.get()
            drained = True
            act()
        return drained

    def _handle(self, event: hooks.EngineEvent) -> None:
        match event:
            case hooks.KVFailed():
                failed = self._attempts.part(event.attempt)
                if failed is not None and event.then == "fail":
                    self._deliver(failed, FinishReason.ERROR, error=event.why)
                elif failed is not None:
                    remote = event.then == "retry"
                    self._attempts.try_again(event.attempt, failed, remote=remote)
            case hooks.KVStuck():
                self._attempts.on_stuck(event.attempt)
            case hooks.KVEnded():
                ready = self._attempts.end(event.attempt)
                if ready is not None:
                    assert event.transfer is not None, f"{event}, but it is still waited for"
                    ready.transfer = event.transfer
                    ready.stopwatch.reach("prefilled", self._clock())
            case hooks.ReleasePrefill():
                # We are between two steps: the last one that named these pages has ended.
                self._scheduler.release(self._scheduler.job(event.job))

    def _run_step(self) -> bool:
        now = self._clock()
        for sequence in self._scheduler.admit():
            sequence.stopwatch.reach("started", now)
            self._attempts.start(sequence)
        hopeless = self._attempts.hopeless()
        if hopeless is not None:  # the next step sees who waits behind it
            self._scheduler.release(hopeless)
            self._deliver(hopeless, FinishReason.ERROR, error=HOPELESS)
            return True
        step = self._scheduler.schedule()
        if not step:
            return False
        for sequence, _ in step:
            sequence.stopwatch.reach("started", now)
        # Read, not calculated: steps that others ran (a warm-up) have counted, too.
        base = self._runner.counter.read()
        chunks = [span for sequence, span in step if sequence.is_job]
        if chunks:
            assert self._prefill_hooks is not None, "prefill jobs come from a messenger"
            self._prefill_hooks.on_step_scheduled(base, chunks)
        results = self._runner.run([span for _, span in step])
        added = self._runner.counter.read() - base
        assert added == self._runner.increments_per_step, (
            f"a step must add {self._runner.increments_per_step} to the counter, this added {added}"
        )
        start, now = now, self._clock()
        sizes = [len(span.token_ids) for _, span in step]
        details = {"largest": max(sizes), "sequences": len(sizes)}
        self._trace.span("steps", f"{sum(sizes)} tokens", start, now, **details)
        for (sequence, span), result in zip(step, results, strict=True):
            self._after_span(sequence, span, result, now)
        # What they owned is free by now, so a client that sees its end sees the balance restored.
        for (sequence, _), result in zip(step, results, strict=True):
            if result.tokens:
                self._deliver(sequence, sequence.finish, tuple(result.tokens))
        return True

    def _after_span(self, sequence: Sequence, span: Span, result: Result, now: float) -> None:
        """Book what a step computed of one sequence, and the tokens chosen after it; those behind
        the end are left out."""
        sequence.num_computed += len(span.token_ids) + (kept := max(0, len(result.tokens) - 1))
        if sequence.is_job:
            return
        # A fetched tail is for the first step alone, and that has just ended.
        self._scheduler.free_tail_slot(sequence)
        sequence.drafts = result.drafts
        for count, token in enumerate(result.tokens, 1):
            sequence.accept(token.token_id)
            sequence.stopwatch.on_token(now)
            if sequence.finish is not None:
                del result.tokens[count:]
        sequence.num_drafts += result.num_drafts
        sequence.num_accepted += min(kept, len(result.tokens))
        if sequence.finish is not None:
            self._scheduler.release(sequence)

    def _cancel(self, number: int) -> None:
        sequence = self._open.get(number)
        if sequence is None:
            return
        if sequence.attempt is not None:
            self._attempts.cancel(sequence.attempt)
        else:
            self._scheduler.release(sequence)
        self._deliver(sequence, FinishReason.CANCELLED)

    def _deliver(
        self,
        sequence: Sequence,
        finish: FinishReason | None,
        new: tuple[Sampled, ...] = (),
        error: str | None = None,
    ) -> None:
        output = Output(
            token_ids=tuple(token.token_id for token in new),
            logprobs=tuple(token.logprobs for token in new if token.logprobs is not None),
            finish_reason=finish,
            error=error,
        )
        if finish is not None:
            with self._lock:
                del self._open[sequence.number]
            watch, moved = sequence.stopwatch, sequence.transfer
            guesses = {name: getattr(sequence, name) for name in ("num_drafts", "num_accepted")}
            watch.record(self._trace, f"request {sequence.number}", self._clock(), **guesses)
            output = replace(output, timings=watch.timings(moved), transfer=moved, **guesses)
        sequence.on_output(output)

    def _end(self, why: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = why
            sequences = list(self._open.values())
        for sequence in sequences:
            self._deliver(sequence, FinishReason.ERROR, error=why)
