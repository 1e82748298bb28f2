"""The one place where everything is wired: a node is an engine, a messenger and a transfer engine.

    main thread       submit, cancel -> engine inbox        answer <- tokens
    engine thread     step: drain, schedule, forward        layer counter += 1
       | hooks                ^ EngineEvents
       v                      |
    messenger thread  poll: layer counter, messages, writes, clocks
       |
    transfer engine   registered: KV pages, tail slots              <====> peer node

Three kinds: a PREFILLER listens and computes for others, a DECODER asks prefillers and generates,
an UNDIVIDED node has no messenger and does both by itself. If several ranks share the model, the
forward pass and the counter are in their processes (`ranks.py`), all else is here as with one.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from disagg.config import (
    ITEMSIZE,
    CacheConfig,
    MessengerConfig,
    ModelConfig,
    RdmaFlags,
    SchedulerConfig,
)
from disagg.engine.engine import Engine
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.ranks import Ranks
from disagg.engine.runner import Runner, make_runner
from disagg.engine.scheduler import Scheduler
from disagg.messenger.decoder import Address, DecoderMessenger
from disagg.messenger.messages import Hello, Identity, Role
from disagg.messenger.prefiller import PrefillerMessenger
from disagg.messenger.sharding import page_of
from disagg.model.rank_group import check_shares
from disagg.model.shape import read_config
from disagg.model.weights import fingerprint
from disagg.request import Request
from disagg.resource import Resource
from disagg.serve.answer import Answer, News
from disagg.serve.tokenizer import TextStream, vocabulary
from disagg.shared_memory import SharedMemory
from disagg.trace import Trace
from disagg.transfer.auto import make_engine, open_nics
from disagg.transfer.interface import Memory, MemoryRegion
from disagg.transfer.transfer_engine import TransferEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a node is. `listen` makes it a prefiller, `prefillers` a decoder, neither: undivided.

    `tp` is how many ranks share the model; if more than one, each is a process of its own.
    `draft_model` guesses for the model, if its own layers do not. `transport` is one of
    `TRANSPORTS`. `trace` is where `close` writes a timeline.
    """

    model: Path
    cache: CacheConfig
    draft_model: Path | None = None
    tp: int = 1
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    messenger: MessengerConfig = field(default_factory=MessengerConfig)
    listen: Address | None = None
    prefillers: tuple[Address, ...] = ()
    transport: str = "auto"
    rdma: RdmaFlags = field(default_factory=RdmaFlags)
    trace: Path | None = None


class Node(Resource):
    """Starts in its constructor, serves until `close()`.

    ValueError if the model or the configuration is wrong, a prefiller cannot be reached or refuses,
    TransferError if the port is taken, RuntimeError if a rank's process ends while it loads.
    """

    #: Only if there are peers.
    _transfer: TransferEngine
    #: From the moment that its model is loaded.
    _engine: Engine

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        #: The model's and, if another one guesses, that one's.
        self._models = _read_configs(config)
        for model in self._models:
            check_shares(model, config.tp)
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._poll_cpus: Set[int] = os.sched_getaffinity(0)
        #: What was said last of the link to each prefiller: its problem, "" if it is up.
        self._link_problems: dict[Address, str] = {}
        role = "prefiller" if config.listen else "decoder" if config.prefillers else "undivided"
        self._trace = Trace(role, on=config.trace is not None)
        self._messenger: PrefillerMessenger | DecoderMessenger | None = None
        #: Told what a thread died of.
        self._on_failure: Callable[[str], None] = lambda why: None
        self.address: Address | None = None
        #: What was started or made, to be ended in the opposite order.
        self._held = ExitStack()
        with self._held:
            hold = self._held.enter_context
            if config.trace is not None:
                self._held.callback(self._trace.write, config.trace)
            #: One for each rank. Of the tails, those of rank 0 are sent and received.
            self._kv_caches = [
                hold(KVCache(config.cache, self._models, config.tp)) for _ in range(config.tp)
            ]
            self._counter = hold(LayerCounter())
            self._start()
            self._held = self._held.pop_all()

    def _start(self) -> None:
        """Reach the peers before loading weights: what refuses should refuse at once."""
        config = self.config
        if config.listen is not None or config.prefillers:
            self._transfer = self._build_transfer()
            self._held.callback(self._transfer.close)
            self._messenger = self._build_messenger()
        if self._messenger is not None and config.prefillers:
            while len(self._link_problems) < len(set(config.prefillers)):
                self._messenger.poll(1.0)  # its clocks bound the wait
            self._start_thread("messenger", self._run_messenger, self._transfer.wake)
        try:
            self._engine = self._build_engine()
        except (RuntimeError, MemoryError) as error:  # too little memory, or a rank was killed
            raise ValueError(f"the model cannot be loaded: {error!r}") from error
        self._on_failure = self._engine.stop
        if self._failure is not None:  # the messenger died while the weights were loaded
            raise ValueError(self._failure)
        self._start_thread("engine", self._engine.run_forever, self._engine.stop)
        if config.listen is not None:
            # Only now: whoever dials is answered at once, and what they ask for goes to the engine.
            self.address = self._transfer.listen(*config.listen)
            self._start_thread("messenger", self._run_messenger, self._transfer.wake)

    def submit(
        self, request: Request, *, stream: TextStream | None = None, news: News | None = None
    ) -> Answer:
        """Start a request; from any thread. ValueError if it can never be served here.

        The answer has text if there is a `stream` to make it. RuntimeError if the node has ended or
        is a prefiller.
        """
        if self.config.listen is not None:
            raise RuntimeError("a prefiller takes requests from decoders only")
        answer = Answer(request, stream=stream, news=news)
        number = self._engine.submit(request, answer.put)
        answer.cancel = partial(self._engine.cancel, number)
        return answer

    def wait(self) -> str | None:
        """Block until `close()` is called or the node dies; what it died of."""
        while not self._stopping.wait(1.0):
            pass  # a signal that another thread took is handled when this one wakes
        return self._failure

    def close(self) -> None:
        """Finish the step that runs, say goodbye, free everything. May be called twice.

        OSError if the timeline cannot be written.
        """
        self._stopping.set()
        self._held.close()

    # --- Wiring ---

    def _build_engine(self) -> Engine:
        config, messenger = self.config, self._messenger
        runner: Runner | Ranks
        if config.tp > 1:
            runner = Ranks(self._kv_caches, self._counter, self._trace)
            self._held.enter_context(runner)
            self._start_thread("engine", runner.watch, runner.close)
        else:
            runner = make_runner(self._kv_caches[0], self._counter, trace=self._trace)
        return Engine(
            runner,
            Scheduler(config.scheduler, config.cache, self._models[0]),
            prefill_hooks=messenger if isinstance(messenger, PrefillerMessenger) else None,
            decode_hooks=messenger if isinstance(messenger, DecoderMessenger) else None,
            trace=self._trace,
        )

    def _build_transfer(self) -> TransferEngine:
        nics, self._poll_cpus = open_nics(self.config.transport, self.config.rdma)
        return make_engine(self.config.transport, nics)

    def _build_messenger(self) -> PrefillerMessenger | DecoderMessenger:
        config, cache, order = self.config, self._kv_caches[0], self.config.cache.kv_layout
        size, itemsize = config.cache.page_size, ITEMSIZE[config.cache.dtype]
        pages = [
            page_of(order, size, m.num_kv_heads, m.head_dim * itemsize, m.num_kv_vectors)
            for m in self._models
        ]
        kv_regions = [self._register(each.memory) for each in self._kv_caches]
        tail_region = self._register(cache.tail_memory)
        hello = Hello(
            epoch=secrets.randbits(64),
            role=Role.PREFILLER if config.listen is not None else Role.DECODER,
            identity=_identity(config, self._models),
            num_pages=config.cache.num_pages,
            num_tail_slots=len(cache.tails),
            tp=config.tp,
            kv_regions=tuple(region.descriptor for region in kv_regions),
            tail_region=tail_region.descriptor,
        )
        self._trace.facts["epoch"] = str(hello.epoch)
        make: Callable[..., PrefillerMessenger | DecoderMessenger]
        if config.listen is None:
            make = partial(DecoderMessenger, addresses=config.prefillers, on_link=self._on_link)
        else:
            writer = partial(PrefillerMessenger, kv_regions=kv_regions, tail_region=tail_region)
            make = partial(writer, read_counter=self._counter.read)
        return make(
            transfer=self._transfer,
            hello=hello,
            kinds=[*zip(cache.layouts, pages, strict=True)],
            tails=cache.tails,
            config=config.messenger,
            clock=time.monotonic,
            post=lambda event: self._engine.post(event),
            trace=self._trace,
        )

    def _register(self, block: SharedMemory) -> MemoryRegion:
        writable = self.config.listen is None  # a prefiller's is a source alone
        where = Memory(address=block.address, nbytes=block.nbytes, fd=block.fd, writable=writable)
        return self._transfer.register(where)

    # --- Threads ---

    def _start_thread(self, name: str, body: Callable[[], None], stop: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(name, body), name=name, daemon=True)
        self._threads.append(thread)
        self._held.callback(self._end_thread, thread, stop)
        thread.start()

    def _end_thread(self, thread: threading.Thread, stop: Callable[[], None]) -> None:
        self._stopping.set()
        stop()
        if thread.is_alive():  # an interrupt may have come before its start
            thread.join()

    def _run(self, name: str, body: Callable[[], None]) -> None:
        """A thread that fails takes the node down: everything after would be wrong."""
        try:
            body()
        except Exception as error:  # whatever it is, the node ends with its text
            logger.info("the %s thread failed", name, exc_info=True)
            self._failure = self._failure or f"the {name} failed: {error!r}"
            self._stopping.set()
            self._on_failure(self._failure)

    def _run_messenger(self) -> None:
        assert self._messenger is not None, "nothing to run"
        os.sched_setaffinity(0, self._poll_cpus)  # of this thread alone
        while not self._stopping.is_set():
            self._messenger.poll(1.0)
        self._messenger.close(self._failure or "the node stops")
        self._transfer.poll(0)

    def _on_link(self, address: Address, ready: bool, why: str) -> None:
        """From the messenger: a link came up, or ended and why. ValueError while this node starts:
        it begins with all of them."""
        text, problem = "prefiller {}:{}: {}".format(*address, why), "" if ready else why
        if problem and not self._threads:
            raise ValueError(text)
        # What was said before need not be said again.
        quiet = problem in ("", self._link_problems.get(address))
        logger.log(logging.INFO if quiet else logging.WARNING, text)
        self._link_problems[address] = problem


def _read_configs(config: NodeConfig) -> list[ModelConfig]:
    """Of the model and, if there is one, the draft model. ValueError if these cannot guess."""
    model, folder = read_config(config.model), config.draft_model
    if not config.scheduler.speculate:
        if folder is not None:
            raise ValueError("a draft model is for guesses; say how many at a time (--speculate)")
        return [model]
    if folder is None:
        if not model.num_mtp_layers:
            raise ValueError(
                f"{config.model} has no draft layer (num_nextn_predict_layers in config.json), so"
                " nothing guesses for it; name a --draft-model, or leave out --speculate"
            )
        return [replace(model, num_draft_layers=1)]
    draft = read_config(folder)
    if draft.vocab_size != model.vocab_size or vocabulary(folder) != vocabulary(config.model):
        raise ValueError(
            f"the draft model {folder} has another vocabulary ({draft.vocab_size} tokens) than"
            f" {config.model} ({model.vocab_size}); expected the same tokenizer.json"
        )
    return [model, draft]


def _identity(config: NodeConfig, models: Sequence[ModelConfig]) -> Identity:
    model, *drafts = models
    told = asdict(config.cache) | asdict(model)
    told["model_fingerprint"] = fingerprint(model)
    told["draft_model_fingerprint"] = "".join(map(fingerprint, drafts))
    return msgspec.convert(told, Identity)
