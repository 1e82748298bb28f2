"""Both messengers over the adversarial transport, with toy engines and a fake clock: a small world.

    World.submit, cancel, stop, wake, kill, restart, cut, fail_write   what a test (or fate) decides
    World.run(steps)      random order of everything that could happen next
    World.heal()          the faults end, time passes, everything must be over and balanced

The toy KV byte of a position depends on every token up to it, so a page that is early, late,
foreign or half-filled is seen by its bytes. The rules are checked where they could be broken: as a
write lands, as an engine event is posted, and at the end.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from disagg.config import MessengerConfig
from disagg.hooks import (
    EngineEvent,
    FetchKV,
    KVFailed,
    KVReady,
    KVReleased,
    KVStuck,
    NextStep,
    PrefillChunk,
    ReleasePrefill,
    StartPrefill,
    StopPrefill,
    TransferStats,
)
from disagg.kv_layout import KVLayout, PageOrder, TailLayout, pages_for
from disagg.messenger.decoder import DecoderMessenger
from disagg.messenger.messages import Identity, PrefillRequest, ProtocolError, Role, decode
from disagg.messenger.messenger import Wiring
from disagg.messenger.node_memory import NodeMemory
from disagg.messenger.prefiller import PrefillerMessenger
from disagg.messenger.prefillers import Prefillers
from disagg.transfer.imm_counter import ImmCounter
from disagg.transfer.interface import Memory
from tests.adversarial import Connection, FakeTransfer, Network, Write

PAGE_SIZE = 3
NUM_LAYERS = 3
FREED = 0xEE
#: How far a prefiller's clock is ahead of the decoder's, in seconds.
CLOCK_AHEAD = 77.25
VOCAB_SIZE = 1000
CONFIG = MessengerConfig(peer_timeout=2.0, request_timeout=10.0, reconnect_interval=0.2)
IDENTITY = Identity(
    model_fingerprint="toy",
    dtype="uint8",
    kv_layout="HND",
    page_size=PAGE_SIZE,
    num_layers=NUM_LAYERS,
    num_draft_layers=0,
    num_kv_heads=1,
    head_dim=1,
    hidden_size=8,
    tp=1,
)


@dataclass(frozen=True, kw_only=True)
class Code:
    """The classes under test; wrong variants take their place."""

    prefiller: type = PrefillerMessenger
    decoder: type = DecoderMessenger
    prefillers: type = Prefillers
    imm_counter: type = ImmCounter


def kv_byte(tokens: tuple[int, ...], layer: int, position: int) -> int:
    """The toy model: what a layer's cache holds at a position. Never FREED, never 0."""
    text = repr((tokens[: position + 1], layer)).encode()
    return zlib.crc32(text) % 200 + 1


def hidden_bytes(tokens: tuple[int, ...]) -> np.ndarray:
    """The toy hidden state at position N-2: uint8 [8]."""
    return np.frombuffer(zlib.crc32(repr(tokens[:-1]).encode()).to_bytes(8, "little"), np.uint8)


class Storage:
    """One node's memory and who owns its pages and slots (None: free)."""

    def __init__(
        self, transfer: FakeTransfer, *, num_pages: int, num_slots: int, awaits_writes: bool
    ) -> None:
        self.layout = KVLayout(
            order=PageOrder.HND,
            num_layers=NUM_LAYERS,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=1,
            head_dim=1,
            itemsize=1,
        )
        self.tail = TailLayout(num_slots=num_slots, hidden_size=8, itemsize=1)
        self.kv = np.full(self.layout.region_bytes, FREED, np.uint8)
        self.tails = np.full(self.tail.region_bytes, FREED, np.uint8)
        self.scratch = np.zeros(64, np.uint8)
        regions = [
            transfer.register(
                Memory(address=array.ctypes.data, nbytes=array.nbytes, writable=writable)
            )
            for array, writable in (
                (self.kv, awaits_writes),
                (self.tails, awaits_writes),
                (self.scratch, False),
            )
        ]
        self.memory = NodeMemory(
            layout=self.layout,
            kv_region=regions[0],
            tail=self.tail,
            tail_region=regions[1],
            tail_bytes=self.tails,
            scratch_region=regions[2],
        )
        self.page_owner: list[int | None] = [None] * num_pages
        self.slot_owner: list[int | None] = [None] * num_slots

    def page(self, layer: int, page: int) -> np.ndarray:
        """One page of one layer: uint8 [2 (K, V), PAGE_SIZE]."""
        offset = layer * self.layout.layer_bytes + page * self.layout.page_bytes
        return self.kv[offset : offset + self.layout.page_bytes].reshape(2, PAGE_SIZE)

    def slot(self, slot: int) -> np.ndarray:
        """One tail slot's bytes."""
        return self.tails[self.tail.slot_offset(slot) :][: self.tail.slot_bytes]

    def take(self, owner: int, num_pages: int, rng: random.Random) -> tuple[int, ...] | None:
        """Random free pages, or None."""
        free = [page for page, held in enumerate(self.page_owner) if held is None]
        if len(free) < num_pages:
            return None
        pages = tuple(rng.sample(free, num_pages))
        for page in pages:
            self.page_owner[page] = owner
        return pages

    def take_slot(self, owner: int) -> int | None:
        """A free slot, or None."""
        if None not in self.slot_owner:
            return None
        slot = self.slot_owner.index(None)
        self.slot_owner[slot] = owner
        return slot

    def free(self, owner: int) -> None:
        """Give back all that `owner` holds, and overwrite it as the next owner would."""
        for page, held in enumerate(self.page_owner):
            if held == owner:
                self.page_owner[page] = None
                for layer in range(NUM_LAYERS):
                    self.page(layer, page)[:] = FREED
        for slot, held in enumerate(self.slot_owner):
            if held == owner:
                self.slot_owner[slot] = None
                self.slot(slot)[:] = FREED

    @property
    def balanced(self) -> bool:
        """Whether everything is free."""
        return not any(o is not None for o in self.page_owner + self.slot_owner)


@dataclass(kw_only=True)
class Job:
    """A prefill job of the toy engine."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...] = ()
    slot: int | None = None
    done: int = 0
    stopped: bool = False


class PrefillNode:
    """A prefiller process: messenger and a toy engine that fills pages layer by layer."""

    def __init__(self, world: World, address: tuple[str, int], epoch: int) -> None:
        self.world, self.address, self.rng = world, address, world.rng
        name = f"prefiller {address} {epoch}"
        self.transfer = FakeTransfer(world.network, name, world.code.imm_counter)
        self.storage = Storage(
            self.transfer, num_pages=world.prefill_pages, num_slots=2, awaits_writes=False
        )
        self.inbox: list[EngineEvent] = []
        self.jobs: dict[int, Job] = {}
        self.counter = self.rng.randrange(50)
        self.chunks: list[PrefillChunk] | None = None
        self.layer = 0
        self.stuck = False
        self.refuses = False
        memory = self.storage.memory
        wiring = Wiring(
            transfer=self.transfer,
            memory=memory,
            hello=memory.hello(
                epoch=epoch,
                role=Role.PREFILLER,
                identity=world.prefiller_identity,
                max_prompt_tokens=100,
            ),
            config=replace(CONFIG, max_open_attempts=world.max_open_attempts),
            clock=self.clock,
            post=self.take,
        )
        self.messenger = world.code.prefiller(wiring, lambda: self.counter)
        self.transfer.listen(*address)

    def clock(self) -> float:
        """Another host's."""
        return self.world.now + CLOCK_AHEAD

    @property
    def runs(self) -> bool:
        return not (self.transfer.stopped or self.transfer.dead)

    def actions(self) -> list[Callable[[], None]]:
        if not self.runs:
            return []
        found: list[Callable[[], None]] = [lambda: self.messenger.poll(0)]
        if self.chunks is not None:
            found.append(self.compute_layer)
        elif not self.stuck:
            found.append(self.start_step)
        return found

    def take(self, event: EngineEvent) -> None:
        """What the real engine's `post` does."""
        if self.refuses and isinstance(event, StartPrefill):
            raise ValueError("no such token")
        self.inbox.append(event)

    def drain(self) -> None:
        """Between steps, as the real engine does."""
        events, self.inbox[:] = list(self.inbox), []
        for event in events:
            match event:
                case StartPrefill():
                    self.jobs[event.job] = Job(tokens=event.token_ids)
                case StopPrefill():
                    self.jobs[event.job].stopped = True
                case ReleasePrefill():
                    del self.jobs[event.job]
                    self.storage.free(event.job)

    def start_step(self) -> None:
        self.drain()
        chunks = []
        for number, job in self.jobs.items():
            last = len(job.tokens) - 1
            if job.stopped or job.done == last or self.rng.random() < 0.3:
                continue
            if not job.pages:
                taken = self.storage.take(number, pages_for(last, PAGE_SIZE), self.rng)
                if taken is None:
                    continue
                job.pages = taken
            size = self.rng.randint(1, last - job.done)
            is_last = job.done + size == last
            if is_last:
                job.slot = self.storage.take_slot(number)
                if job.slot is None:
                    continue
            chunks.append(
                PrefillChunk(
                    job=number,
                    first_token=job.done,
                    num_tokens=size,
                    page_indices=job.pages,
                    tail_slot=job.slot if is_last else None,
                )
            )
            job.done += size
        self.messenger.on_step_scheduled(self.counter, tuple(chunks))
        self.chunks, self.layer = chunks, 0

    def compute_layer(self) -> None:
        assert self.chunks is not None
        for chunk in self.chunks:
            tokens = self.jobs[chunk.job].tokens
            if self.layer < NUM_LAYERS:
                for position in range(chunk.first_token, chunk.first_token + chunk.num_tokens):
                    page = chunk.page_indices[position // PAGE_SIZE]
                    value = kv_byte(tokens, self.layer, position)
                    self.storage.page(self.layer, page)[:, position % PAGE_SIZE] = value
            elif chunk.tail_slot is not None:
                slot = self.storage.slot(chunk.tail_slot)
                slot[24:32] = hidden_bytes(tokens)
                slot[16:24] = np.array([self.clock() * 1e9], np.uint64).view(np.uint8)
                self.world.forward_ends.append(self.world.now)
        self.counter += 1
        self.layer += 1
        if self.layer == NUM_LAYERS + 1:
            self.chunks = None


@dataclass(kw_only=True)
class Client:
    """One request as its client sees it: `ended` is None until it is answered."""

    tokens: tuple[int, ...]
    attempt: int | None = None
    retries: int = 0
    cancelled: bool = False
    ended: str | None = None
    submitted_at: float = 0.0


class DecodeNode:
    """The decoder process: messenger and a toy engine that checks every byte before it decodes."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world, self.rng = world, world.rng
        self.transfer = FakeTransfer(world.network, "decoder", world.code.imm_counter)
        self.storage = Storage(
            self.transfer, num_pages=world.decode_pages, num_slots=3, awaits_writes=True
        )
        self.inbox: list[EngineEvent] = []
        self.waiting: list[Client] = []
        self.fetching: dict[int, tuple[Client, FetchKV]] = {}
        self.abandoned: dict[int, str] = {}  # attempts that await KVReleased, and why
        self.decoding: list[int] = []
        self.next_attempt = 1
        memory = self.storage.memory
        hello = memory.hello(
            epoch=epoch, role=Role.DECODER, identity=IDENTITY, max_prompt_tokens=100
        )
        wiring = Wiring(
            transfer=self.transfer,
            memory=memory,
            hello=hello,
            config=replace(CONFIG, on_failure=world.on_failure),
            clock=world.clock,
            post=self.take,
        )
        prefillers = world.code.prefillers(
            [node.address for node in world.prefill_nodes],
            wiring,
            on_link=lambda address, ready, why: world.links.append((address, ready, why)),
        )
        self.messenger = world.code.decoder(wiring, prefillers)

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = [lambda: self.messenger.poll(0), self.step]
        if self.decoding:
            found.append(self.finish_one)
        return found

    def take(self, event: EngineEvent) -> None:
        """What the real engine's `post` does."""
        self.inbox.append(event)
        if isinstance(event, KVReady):
            self.world.moved.append((event.transfer, self.world.now))

    def step(self) -> None:
        """Drain the messenger's events, then admit what fits."""
        events, self.inbox[:] = list(self.inbox), []
        for event in events:
            self.on_event(event)
        while self.waiting:
            client = self.waiting[0]
            number = self.next_attempt
            pages = self.storage.take(number, pages_for(len(client.tokens), PAGE_SIZE), self.rng)
            if pages is None:
                break
            slot = self.storage.take_slot(number)
            if slot is None:
                self.storage.free(number)
                break
            self.waiting.pop(0)
            self.next_attempt += 1
            client.attempt = number
            pages = pages[: pages_for(len(client.tokens) - 1, PAGE_SIZE)]
            fetch = FetchKV(
                attempt=number,
                token_ids=client.tokens,
                page_indices=pages,
                tail_slot=slot,
                num_held_pages=self.hold(client.tokens, pages),
                retries=client.retries,
            )
            self.fetching[number] = (client, fetch)
            self.messenger.on_fetch(fetch)

    def hold(self, tokens: tuple[int, ...], pages: tuple[int, ...]) -> int:
        """Now and then some leading pages are here already, as after a prefix cache hit."""
        num_held = self.rng.randint(0, len(pages)) if self.rng.random() < 0.3 else 0
        for position in range(min(num_held * PAGE_SIZE, len(tokens) - 1)):
            for layer in range(NUM_LAYERS):
                page = self.storage.page(layer, pages[position // PAGE_SIZE])
                page[:, position % PAGE_SIZE] = kv_byte(tokens, layer, position)
        return num_held

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case KVReady():
                assert event.attempt not in self.abandoned or self.abandoned[event.attempt] == (
                    "cancelled"
                ), f"KVReady for attempt {event.attempt}, which failed"
                if event.attempt in self.abandoned:
                    return  # it crossed the cancel; KVReleased follows
                client, fetch = self.fetching.pop(event.attempt)
                self.check_kv(fetch)
                self.decoding.append(event.attempt)
                client.ended = "ready"
            case KVFailed():
                if event.attempt in self.abandoned:
                    assert self.abandoned[event.attempt] == "cancelled", f"{event} said twice"
                    return
                client, fetch = self.fetching.pop(event.attempt)
                self.abandoned[event.attempt] = "failed"
                self.world.failures.append(event.why)
                if event.then is NextStep.RETRY:
                    client.retries += 1
                    self.waiting.insert(0, client)
                else:
                    client.ended = event.then.value
            case KVStuck():
                assert event.attempt in self.abandoned, f"{event} of an attempt not given up"
                self.world.stuck.append(event.attempt)
            case KVReleased():
                assert event.attempt not in self.fetching, f"{event} of an attempt not given up"
                # Unknown: a failed attempt's cancel crossed its end and was answered once more.
                if self.abandoned.pop(event.attempt, None) is not None:
                    self.storage.free(event.attempt)

    def cancel(self, client: Client) -> None:
        if client.ended is not None:
            return
        client.cancelled, client.ended = True, "cancelled"
        if client in self.waiting:
            self.waiting.remove(client)
        elif client.attempt is not None and client.attempt in self.fetching:
            del self.fetching[client.attempt]
            self.abandoned[client.attempt] = "cancelled"
            self.messenger.on_cancel(client.attempt)

    def finish_one(self) -> None:
        self.storage.free(self.decoding.pop(self.rng.randrange(len(self.decoding))))

    def check_kv(self, fetch: FetchKV) -> None:
        """Rule 9's last word: never decode a half-filled, early or foreign KV."""
        for layer in range(NUM_LAYERS):
            for position in range(len(fetch.token_ids) - 1):
                page = fetch.page_indices[position // PAGE_SIZE]
                found = self.storage.page(layer, page)[:, position % PAGE_SIZE]
                expected = kv_byte(fetch.token_ids, layer, position)
                assert (found == expected).all(), (
                    f"attempt {fetch.attempt}, layer {layer}, position {position}:"
                    f" found {found}, expected {expected}"
                )
        found = self.storage.slot(fetch.tail_slot)[24:32]
        expected = hidden_bytes(fetch.token_ids)
        assert (found == expected).all(), f"attempt {fetch.attempt}: tail {found} is not {expected}"


@dataclass(kw_only=True)
class Asked:
    """What one PrefillRequest allows: seen on the wire, so no messenger can bend it."""

    attempt: int
    pages: set[int]
    held: set[int]
    slot: int
    landed: set[tuple[int, int]] = field(default_factory=set)


class World:
    """See the module's docstring."""

    def __init__(
        self,
        seed: int,
        *,
        num_prefillers: int = 1,
        on_failure: str = "local",
        prefill_pages: int = 12,
        decode_pages: int = 16,
        prefiller_identity: Identity = IDENTITY,
        max_open_attempts: int = 1024,
        code: Code | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.on_failure = on_failure
        self.prefill_pages, self.decode_pages = prefill_pages, decode_pages
        self.prefiller_identity = prefiller_identity
        self.max_open_attempts = max_open_attempts
        self.code = code or Code()
        self.network = Network(self.rng)
        self.network.on_write_lands = self.check_write
        self.network.on_message_sent = self.note_message
        self.asked: dict[tuple[int, int], Asked] = {}  # (connection, imm)
        self.links: list[tuple[tuple[str, int], bool, str]] = []
        self.failures: list[str] = []
        self.stuck: list[int] = []
        self.forward_ends: list[float] = []
        self.moved: list[tuple[TransferStats, float]] = []  # and when it was told
        self.clients: list[Client] = []
        self.epochs = 1
        self.forge_tails = False
        self.prefill_nodes: list[PrefillNode] = []
        for port in range(num_prefillers):
            self.prefill_nodes.append(PrefillNode(self, ("host", port), self.new_epoch()))
        self.decode_node = DecodeNode(self, self.new_epoch())

    def clock(self) -> float:
        return self.now

    def new_epoch(self) -> int:
        self.epochs += 1
        return self.epochs

    # --- What a test decides ---

    def submit(self, num_tokens: int) -> Client:
        tokens = tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        client = Client(tokens=tokens, submitted_at=self.now)
        self.clients.append(client)
        self.decode_node.waiting.append(client)
        return client

    def cancel(self, client: Client) -> None:
        self.decode_node.cancel(client)

    def stop(self, index: int) -> None:
        self.prefill_nodes[index].transfer.stopped = not self.prefill_nodes[index].transfer.dead

    def wake(self, index: int) -> None:
        self.prefill_nodes[index].transfer.stopped = False

    def kill(self, index: int) -> None:
        self.prefill_nodes[index].transfer.kill()
        self.network.listeners.pop(self.prefill_nodes[index].address, None)

    def restart(self, index: int) -> None:
        self.kill(index)
        address = self.prefill_nodes[index].address
        self.prefill_nodes[index] = PrefillNode(self, address, self.new_epoch())

    def cut(self) -> None:
        """One connection ends for one side; the other learns it later."""
        alive = [conn for conn in self.network.connections if not all(conn.lost)]
        if alive:
            self.network.lose(self.rng.choice(alive), self.rng.randrange(2), "cut")

    def fail_write(self, index: int) -> None:
        self.prefill_nodes[index].transfer.fail_write()

    def reject_write(self, index: int) -> None:
        self.prefill_nodes[index].transfer.reject_after = self.rng.randrange(4)

    # --- What happens by itself ---

    def actions(self) -> list[Callable[[], None]]:
        found = self.network.actions() + self.decode_node.actions()
        for node in self.prefill_nodes:
            found += node.actions()
        return found

    def run(self, steps: int, *, tick: float = 0.02) -> None:
        """Random order; time passes a little now and then."""
        for _ in range(steps):
            self.rng.choice(self.actions())()
            if self.rng.random() < 0.1:
                self.now += self.rng.random() * tick * 2

    def run_fairly(self, seconds: float, *, tick: float = 0.2) -> None:
        """Time passes and everything that can happen does, in random order."""
        until = self.now + seconds
        while self.now < until:
            for _ in range(4):
                for node in [self.decode_node, *self.prefill_nodes]:
                    for action in node.actions():
                        action()
                for _ in range(30):
                    medium = self.network.actions()
                    if not medium:
                        break
                    self.rng.choice(medium)()
            self.now += tick

    def heal(self, *, wake: bool = True) -> None:
        """The faults end; then every request is answered and everything is given back."""
        for index, node in enumerate(self.prefill_nodes):
            if wake:
                self.wake(index)
            node.transfer.reject_after = -1
        self.run_fairly(CONFIG.request_timeout + 3 * CONFIG.peer_timeout)
        unanswered = [client for client in self.clients if client.ended is None]
        if not wake:  # quarantined pages and slots are "not now" for as long as the peer is stopped
            unanswered = [c for c in unanswered if c not in self.decode_node.waiting]
        assert not unanswered, f"{len(unanswered)} requests were never answered"
        while self.decode_node.decoding:
            self.decode_node.finish_one()
        if not wake:
            return
        assert len(self.decode_node.messenger._attempts) == 0, "attempts left open"
        assert self.decode_node.storage.balanced, (
            f"decoder pages {self.decode_node.storage.page_owner} left in use"
        )
        for node in self.prefill_nodes:
            if node.runs:
                node.drain()
                assert len(node.messenger._writer) == 0, "attempts left open"
                assert node.storage.balanced, (
                    f"prefiller pages {node.storage.page_owner} left in use"
                )

    # --- Checks ---

    def note_message(self, conn: Connection, end: int, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError:
            return  # a scenario forges it
        if isinstance(message, PrefillRequest) and conn.ends[end] is self.decode_node.transfer:
            pages = message.page_indices
            assert all(imm != message.imm for _, imm in self.asked), f"imm {message.imm} reused"
            self.asked[id(conn), message.imm] = Asked(
                attempt=message.attempt_id & 0xFFFFFFFF,
                pages=set(pages),
                held=set(pages[: message.num_held_pages]),
                slot=message.tail_slot,
            )

    def check_write(self, write: Write) -> None:
        """As a write lands: is the place still the attempt's, is the source still the job's?"""
        writer, reader = write.conn.ends, self.decode_node
        if reader.transfer not in writer:
            return  # into a stranger's memory
        source_node = next(n for n in self.prefill_nodes if n.transfer in writer)
        asked = self.asked[id(write.conn), write.imm]
        layout, held = reader.storage.layout, reader.storage
        if write.region == 1:
            slot = write.offset // held.tail.slot_bytes
            place = (NUM_LAYERS, slot)
            assert slot == asked.slot, f"a tail landed in slot {slot}, not in {asked.slot}"
            assert held.slot_owner[slot] == asked.attempt, f"a tail landed in freed slot {slot}"
        else:
            layer, inside = divmod(write.offset, layout.layer_bytes)
            page = inside // layout.page_bytes
            place = (layer, page)
            assert page in asked.pages - asked.held, f"a write landed in foreign page {page}"
            owner = held.page_owner[page]
            assert owner == asked.attempt, (
                f"a write of attempt {asked.attempt} landed in page {page}, now {owner}'s"
            )
        assert place not in asked.landed, f"layer and page {place} were written twice"
        asked.landed.add(place)
        if write.region == 1 and self.forge_tails:
            write.source = write.source.copy()
            write.source[0] ^= 0xFF
        assert not (write.source == FREED).all(), (
            f"the source of {place} on {source_node.address} was freed before its write completed"
        )
