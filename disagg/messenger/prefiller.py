"""The prefiller's half of the hand-over: take requests, answer cancels, report failures.

    engine                     PrefillerMessenger                      decoder
      | <-- StartPrefill ---------- | <---------- PrefillRequest --------- |
      | on_step_scheduled(b, ...) ->|                                      |
      | layer counter: b+1 -------> | == layer 0's finished pages, imm ==> |
      |                b+2 -------> | == layer 1's finished pages, imm ==> |
      |                b+L+1 -----> | == tail (last chunk only), imm ====> |
      | <-- ReleasePrefill -------- | once its own writes completed        |

Here are the messages; `layer_writer.py` turns layers into writes, and `admission.py` says who may
connect and what may be asked. One thread makes every call but `on_step_scheduled`.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from disagg.hooks import Span, StartPrefill
from disagg.kv_layout import heads_of_rank
from disagg.messenger import messages
from disagg.messenger.admission import check_hello, check_request
from disagg.messenger.layer_writer import LayerWriter, Link
from disagg.messenger.messages import Hello, Message, PrefillStopped, ProtocolError, Role
from disagg.messenger.messenger import Messenger, Wiring
from disagg.messenger.sharding import make_plan
from disagg.transfer.interface import Pages, Peer, TransferError, WritesDone

logger = logging.getLogger(__name__)


class PrefillerMessenger(Messenger):
    """See the module's docstring. `read_counter` reads the layer counter."""

    def __init__(self, wiring: Wiring, read_counter: Callable[[], int]) -> None:
        super().__init__(wiring)
        self._writer = LayerWriter(wiring, read_counter)
        self._rng = wiring.rng
        self._links: dict[Peer, Link] = {}

    # --- From the engine, any thread ---

    def on_step_scheduled(self, base: int, chunks: Sequence[Span]) -> None:
        """`PrefillHooks`: a step with these chunks starts at counter `base`."""
        self._writer.add_step(base, chunks)
        self._transfer.wake()

    # --- The loop ---

    def poll(self, timeout: float) -> None:
        """One look at everything: transfer events, the layer counter, the clocks."""
        timeout = min(timeout, self._config.heartbeat_interval / 2, self._writer.pause)
        events = self._transfer.poll(timeout)
        # Ended tickets first, all of them: only open ones can be withdrawn by what follows.
        self._writer.settle(event for event in events if isinstance(event, WritesDone))
        for event in events:
            self._on_event(event)
        self._writer.post_finished_layers()
        self._watch_silence()

    def _greeted(self) -> Collection[Peer]:
        return self._links

    # --- Messages ---

    def _on_word(self, peer: Peer, message: Message) -> None:
        link = self._links[peer]
        match message:
            case messages.PrefillRequest():
                self._on_request(peer, link, message)
            case messages.Cancel():
                self._on_cancel(link, message)
            case messages.ProbeRequest():
                self._on_probe(peer, link, message)
            case _:
                super()._on_word(peer, message)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        check_hello(self._hello, hello, accepts=(Role.DECODER, Role.PROBE))
        for other, link in self._links.items():
            if link.hello.epoch == hello.epoch:
                self._close_peer(other, "the same process connected again")
        memory, tp = self._memory, 1 if hello.role == Role.PROBE else hello.tp
        heads = len(heads_of_rank(memory.page[1], tp, 0))
        layout = replace(memory.layout, num_pages=hello.num_pages, num_kv_heads=heads)
        plan = make_plan(memory.page, memory.tp, tp)
        self._links[peer] = Link(peer=peer, hello=hello, layout=layout, plan=plan)
        self._send(peer, self._hello)
        self._beat(peer)  # so that it can read our clock before the first tail comes

    def _on_request(self, peer: Peer, link: Link, request: messages.PrefillRequest) -> None:
        if link.hello.role != Role.DECODER:
            raise ProtocolError(f"a {link.hello.role} has no pages to fill")
        if request.attempt_id in self._writer.attempts:
            raise ProtocolError(f"attempt {request.attempt_id:#x} was asked for twice")
        if len(self._writer.attempts) >= self._config.max_open_attempts:
            why = f"{len(self._writer.attempts)} prompts are in work here already; try again later"
            self._reject(peer, request.attempt_id, why, permanent=False)
            return
        slices = self._rng.choice(link.plan)
        try:
            check_request(request, layout=self._memory.layout, theirs=link.hello, slices=slices)
            self._post(StartPrefill(job=request.attempt_id, token_ids=request.token_ids))
        except ValueError as error:  # the engine has a word on what it can never compute
            self._reject(peer, request.attempt_id, str(error), permanent=True)
        else:
            self._writer.open(link, request, slices)

    def _reject(self, peer: Peer, attempt_id: int, why: str, *, permanent: bool) -> None:
        self._send(peer, PrefillStopped(attempt_id=attempt_id, why=why, permanent=permanent))

    def _on_cancel(self, link: Link, cancel: messages.Cancel) -> None:
        attempt = self._writer.attempts.get(cancel.attempt_id)
        # Unknown: all was posted and completed (or the end was told before, and this crossed it).
        if attempt is not None and attempt.link is link:
            self._writer.stop(attempt, "cancelled")

    def _on_probe(self, peer: Peer, link: Link, probe: messages.ProbeRequest) -> None:
        scratch, num_pages = self._memory.scratch_region, probe.num_pages
        there, nbytes, imm = link.hello.tail_region, probe.page_bytes, probe.imm
        try:
            if num_pages > (most := messages.MAX_PROBE_PAGES):
                raise TransferError(f"expected at most {most} pages, got {num_pages}")
            numbers = np.arange(num_pages, dtype=np.int64)
            src = numbers % max(1, scratch.memory.nbytes // nbytes) * nbytes
            pages = Pages(scratch, there, nbytes, src, numbers * nbytes)
            self._transfer.write_pages(peer, pages, imm)
        except TransferError as error:
            self._reject(peer, 0, str(error), permanent=True)  # a probe is no attempt

    def _on_peer_lost(self, peer: Peer, why: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            logger.warning("refused a caller: %s", why)
        else:
            logger.info("decoder %d lost: %s", peer, why)
            self._writer.on_peer_lost(link, why)
