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

import msgspec
import numpy as np

from disagg.config import MessengerConfig
from disagg.hooks import (
    EngineEvent,
    FetchKV,
    KVEnded,
    KVFailed,
    KVStuck,
    ReleasePrefill,
    Span,
    StartPrefill,
)
from disagg.kv_layout import KVLayout, PageOrder, heads_of_rank, pages_for, tail_slot
from disagg.messenger.decoder import DecoderMessenger
from disagg.messenger.messages import Hello, Identity, PrefillRequest, ProtocolError, Role, decode
from disagg.messenger.prefiller import PrefillerMessenger
from disagg.messenger.sharding import page_of
from disagg.request import TransferStats
from disagg.transfer.imm_counter import ImmCounter
from disagg.transfer.interface import Memory
from tests.adversarial import Connection, FakeTransfer, Network, Write

PAGE_SIZE = 3
NUM_LAYERS = 3
#: Number of a node's tail region; its KV regions come after it.
TAIL_REGION, FIRST_KV_REGION = 0, 1
FREED = 0xEE
SLOT_BYTES = 64
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
    draft_model_fingerprint="",
    num_kv_heads=1,
    num_kv_vectors=2,
    head_dim=1,
    hidden_size=8,
)


@dataclass(frozen=True, kw_only=True)
class Code:
    """The classes under test; wrong variants take their place."""

    prefiller: type = PrefillerMessenger
    decoder: type = DecoderMessenger
    imm_counter: type = ImmCounter


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Ranks that share the heads: of a prefiller, and of each group of each decoder."""

    order: PageOrder = PageOrder.HND
    num_kv_heads: int = 1
    prefill_tp: int = 1
    decode_tps: tuple[int, ...] = (1,)
    decode_dp: int = 1


def kv_bytes(tokens: tuple[int, ...], layer: int, position: int, heads: range) -> np.ndarray:
    """The toy model: what a layer's cache holds at a position. Never FREED, never 0.

    uint8 `[len(heads), 2 (K, V)]`.
    """
    start = zlib.crc32(repr((tokens[: position + 1], layer)).encode())
    values = [[zlib.crc32(bytes((head, kv)), start) % 200 + 1 for kv in (0, 1)] for head in heads]
    return np.array(values, np.uint8)


def hidden_bytes(tokens: tuple[int, ...]) -> np.ndarray:
    """The toy hidden state at position N-2: uint8 [8]."""
    return np.frombuffer(zlib.crc32(repr(tokens[:-1]).encode()).to_bytes(8, "little"), np.uint8)


class Storage:
    """The memory of one node and all its ranks; who owns its pages and slots (None: free)."""

    def __init__(
        self,
        transfer: FakeTransfer,
        shards: Shards,
        *,
        tp: int,
        dp: int = 1,
        num_pages: int,
        num_slots: int,
        awaits_writes: bool,
    ) -> None:
        self.heads = [heads_of_rank(shards.num_kv_heads, tp, rank) for rank in range(tp)] * dp
        self.layout = KVLayout(
            order=shards.order,
            num_layers=NUM_LAYERS,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=len(self.heads[0]),
            head_dim=1,
            itemsize=1,
        )
        self.kv = [np.full(self.layout.region_bytes, FREED, np.uint8) for _ in self.heads]
        self.tails = np.full((num_slots, SLOT_BYTES), FREED, np.uint8)
        self.tail_region, *self.kv_regions = [
            transfer.register(
                Memory(address=array.ctypes.data, nbytes=array.nbytes, writable=awaits_writes)
            )
            for array in (self.tails, *self.kv)
        ]
        page = page_of(shards.order, PAGE_SIZE, shards.num_kv_heads, vector_bytes=1)
        #: What a messenger is told of it.
        self.memory = {
            "kinds": [(self.layout, page)],
            "tails": self.tails.ravel().view(tail_slot(8)),
        }
        self.tp = tp
        self.page_owner: list[int | None] = [None] * num_pages
        self.slot_owner: list[int | None] = [None] * num_slots

    def hello(self, epoch: int, role: Role, identity: Identity) -> Hello:
        """What its node says of itself."""
        return Hello(
            epoch=epoch,
            role=role,
            identity=identity,
            num_pages=self.layout.num_pages,
            num_tail_slots=len(self.tails),
            tp=self.tp,
            kv_regions=tuple(region.descriptor for region in self.kv_regions),
            tail_region=self.tail_region.descriptor,
        )

    def page(self, layer: int, page: int) -> list[np.ndarray]:
        """One page of one layer on each rank: uint8 [heads, 2 (K, V), PAGE_SIZE]."""
        shape = (NUM_LAYERS, self.layout.num_pages, *self.layout.page_shape[:3])
        pages = [kv.reshape(shape)[layer, page] for kv in self.kv]
        hnd = self.layout.order == PageOrder.HND
        return pages if hnd else [page.transpose(2, 0, 1) for page in pages]

    def fill(self, tokens: tuple[int, ...], layer: int, position: int, page: int) -> None:
        """The toy model's forward pass at a position, on each rank."""
        for heads, found in zip(self.heads, self.page(layer, page), strict=True):
            found[..., position % PAGE_SIZE] = kv_bytes(tokens, layer, position, heads)

    def slot(self, slot: int) -> np.ndarray:
        """One tail slot's bytes."""
        return self.tails[slot]

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
                    for found in self.page(layer, page):
                        found[:] = FREED
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


class PrefillNode:
    """A prefiller process: messenger and a toy engine that fills pages layer by layer."""

    def __init__(self, world: World, address: tuple[str, int], epoch: int) -> None:
        self.world, self.address, self.rng = world, address, world.rng
        name = f"prefiller {address} {epoch}"
        self.transfer = FakeTransfer(world.network, name, world.code.imm_counter)
        self.storage = Storage(
            self.transfer,
            world.shards,
            tp=world.shards.prefill_tp,
            num_pages=world.prefill_pages,
            num_slots=2,
            awaits_writes=False,
        )
        self.inbox: list[EngineEvent] = []
        self.jobs: dict[int, Job] = {}
        self.counter = self.rng.randrange(50)
        self.chunks: list[Span] | None = None
        self.layer = 0
        self.stuck = False
        self.refuses = False
        self.num_asked = 0
        self.messenger = world.code.prefiller(
            **self.storage.memory,
            kv_regions=self.storage.kv_regions,
            tail_region=self.storage.tail_region,
            transfer=self.transfer,
            hello=self.storage.hello(epoch, Role.PREFILLER, world.prefiller_identity),
            config=replace(CONFIG, max_open_attempts=world.max_open_attempts),
            clock=self.clock,
            post=self.take,
            read_counter=lambda: self.counter,
            rng=random.Random(epoch),
        )
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
        if isinstance(event, StartPrefill):
            self.num_asked += 1
            num_pages = pages_for(len(event.token_ids) - 1, PAGE_SIZE)
            if self.refuses or num_pages > len(self.storage.page_owner):
                raise ValueError("no such token, or too long")
        self.inbox.append(event)

    def drain(self) -> None:
        """Between steps, as the real engine does."""
        events, self.inbox[:] = list(self.inbox), []
        for event in events:
            match event:
                case StartPrefill():
                    self.jobs[event.job] = Job(tokens=event.token_ids)
                case ReleasePrefill():
                    del self.jobs[event.job]
                    self.storage.free(event.job)

    def start_step(self) -> None:
        self.drain()
        chunks = []
        for number, job in self.jobs.items():
            last = len(job.tokens) - 1
            if job.done == last or self.rng.random() < 0.3:
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
                Span(
                    number=number,
                    first_token=job.done,
                    token_ids=job.tokens[job.done : job.done + size],
                    page_indices=job.pages[: pages_for(job.done + size, PAGE_SIZE)],
                    tail_slot=job.slot if is_last else None,
                )
            )
            job.done += size
        self.messenger.on_step_scheduled(self.counter, tuple(chunks))
        self.chunks, self.layer = chunks, 0

    def compute_layer(self) -> None:
        assert self.chunks is not None
        for chunk in self.chunks:
            tokens = self.jobs[chunk.number].tokens
            if self.layer < NUM_LAYERS:
                for position in range(chunk.first_token, chunk.first_token + len(chunk.token_ids)):
                    page = chunk.page_indices[position // PAGE_SIZE]
                    self.storage.fill(tokens, self.layer, position, page)
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
    node: DecodeNode
    attempt: int | None = None
    retries: int = 0
    cancelled: bool = False
    ended: str | None = None
    submitted_at: float = 0.0


class DecodeNode:
    """A decoder process: messenger and a toy engine that checks every byte before it decodes."""

    def __init__(self, world: World, tp: int, epoch: int, first_attempt: int) -> None:
        self.world, self.rng, self.tp, self.dp = world, world.rng, tp, world.shards.decode_dp
        self.transfer = FakeTransfer(world.network, f"decoder {epoch}", world.code.imm_counter)
        self.storage = Storage(
            self.transfer,
            world.shards,
            tp=tp,
            dp=self.dp,
            num_pages=world.decode_pages,
            num_slots=3,
            awaits_writes=True,
        )
        self.inbox: list[EngineEvent] = []
        self.waiting: list[Client] = []
        self.fetching: dict[int, tuple[Client, FetchKV]] = {}
        self.abandoned: dict[int, str] = {}  # attempts that await KVEnded, and why
        self.decoding: list[int] = []
        self.next_attempt = first_attempt
        self.messenger = world.code.decoder(
            **self.storage.memory,
            transfer=self.transfer,
            hello=self.storage.hello(epoch, Role.DECODER, world.identity),
            config=replace(CONFIG, on_failure=world.on_failure),
            clock=world.clock,
            post=self.take,
            addresses=[node.address for node in world.prefill_nodes],
            on_link=lambda address, ready, why: world.links.append((address, ready, why)),
        )

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = [lambda: self.messenger.poll(0), self.step]
        if self.decoding:
            found.append(self.finish_one)
        return found

    def take(self, event: EngineEvent) -> None:
        """What the real engine's `post` does."""
        self.inbox.append(event)
        if isinstance(event, KVEnded) and event.transfer is not None:
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
                retries=client.retries,
                dp_rank=self.rng.randrange(self.dp) if self.dp > 1 else 0,
            )
            self.fetching[number] = (client, fetch)
            self.messenger.on_fetch(fetch)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case KVFailed():
                if event.attempt in self.abandoned:
                    assert self.abandoned[event.attempt] == "cancelled", f"{event} said twice"
                    return
                client, fetch = self.fetching.pop(event.attempt)
                self.abandoned[event.attempt] = "failed"
                self.world.failures.append(event.why)
                if event.then == "retry":
                    client.retries += 1
                    self.waiting.insert(0, client)
                else:
                    client.ended = event.then
            case KVStuck():
                assert event.attempt in self.abandoned, f"{event} of an attempt not given up"
                self.world.stuck.append(event.attempt)
            case KVEnded() if event.attempt in self.abandoned:
                why = self.abandoned.pop(event.attempt)
                assert event.transfer is None or why == "cancelled", f"{event}, which failed"
                self.storage.free(event.attempt)
            case KVEnded():
                client, fetch = self.fetching.pop(event.attempt)
                assert event.transfer is not None, f"{event} of an attempt not given up"
                self.check_kv(fetch, event.transfer)
                self.decoding.append(event.attempt)
                client.ended = "ready"

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

    def check_kv(self, fetch: FetchKV, said: TransferStats) -> None:
        """Rule 9's last word: never decode a half-filled, early or foreign KV."""
        asked = next(
            asked
            for asked in self.world.asked.values()
            if asked.node is self and asked.attempt == fetch.attempt
        )
        for layer in range(NUM_LAYERS):
            for position in range(len(fetch.token_ids) - 1):
                page = fetch.page_indices[position // PAGE_SIZE]
                for rank, whole in enumerate(self.storage.page(layer, page)):
                    if rank not in asked.ranks:
                        continue
                    found = whole[..., position % PAGE_SIZE]
                    heads = self.storage.heads[rank]
                    expected = kv_bytes(fetch.token_ids, layer, position, heads)
                    assert (found == expected).all(), (
                        f"attempt {fetch.attempt}, layer {layer}, position {position}, rank {rank}:"
                        f" found {found}, expected {expected}"
                    )
        num_pages = NUM_LAYERS * len(asked.pages) * self.tp
        num_bytes = num_pages * self.storage.layout.page_bytes + SLOT_BYTES
        assert len(asked.landed) == num_bytes, f"{len(asked.landed)} of {num_bytes} bytes landed"
        assert said.writes == asked.num_writes == asked.expected_count, f"{asked} is not {said}"
        assert said.bytes == num_bytes, f"{num_bytes} bytes came, not {said}"
        found = self.storage.slot(fetch.tail_slot)[24:32]
        expected = hidden_bytes(fetch.token_ids)
        assert (found == expected).all(), f"attempt {fetch.attempt}: tail {found} is not {expected}"


@dataclass(kw_only=True)
class Asked:
    """What one PrefillRequest allows: seen on the wire, so no messenger can bend it."""

    node: DecodeNode
    attempt: int
    pages: set[int]
    slot: int
    ranks: range
    expected_count: int
    num_writes: int = 0
    landed: set[tuple[int, int]] = field(default_factory=set)  # (region, byte)


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
        prefiller_identity: Identity | None = None,
        shards: Shards | None = None,
        max_open_attempts: int = 1024,
        code: Code | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.on_failure = on_failure
        self.prefill_pages, self.decode_pages = prefill_pages, decode_pages
        self.shards = shards = shards or Shards()
        self.medium_steps = 30 if shards == Shards() else 900  # for there are so many more writes
        self.identity = msgspec.structs.replace(
            IDENTITY, kv_layout=shards.order, num_kv_heads=shards.num_kv_heads
        )
        self.prefiller_identity = prefiller_identity or self.identity
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
        self.wrote: set[int] = set()  # ranks of prefillers
        self.prefill_nodes: list[PrefillNode] = []
        for port in range(num_prefillers):
            self.prefill_nodes.append(PrefillNode(self, ("host", port), self.new_epoch()))
        self.decode_nodes = [
            DecodeNode(self, tp, self.new_epoch(), first_attempt=1 + 1000 * number)
            for number, tp in enumerate(shards.decode_tps)
        ]
        self.decode_node = self.decode_nodes[0]

    def clock(self) -> float:
        return self.now

    def new_epoch(self) -> int:
        self.epochs += 1
        return self.epochs

    # --- What a test decides ---

    def submit(self, num_tokens: int, node: DecodeNode | None = None) -> Client:
        node = node or self.decode_node
        tokens = tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        client = Client(tokens=tokens, node=node, submitted_at=self.now)
        self.clients.append(client)
        node.waiting.append(client)
        return client

    def cancel(self, client: Client) -> None:
        client.node.cancel(client)

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
        found = self.network.actions()
        for node in (*self.decode_nodes, *self.prefill_nodes):
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
                for node in (*self.decode_nodes, *self.prefill_nodes):
                    for action in node.actions():
                        action()
                for _ in range(self.medium_steps):
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
            unanswered = [c for c in unanswered if c not in c.node.waiting]
        assert not unanswered, f"{len(unanswered)} requests were never answered"
        for node in self.decode_nodes:
            while node.decoding:
                node.finish_one()
        if not wake:
            return
        for node in self.decode_nodes:
            assert len(node.messenger._attempts) == 0, "attempts left open"
            assert node.storage.balanced, f"decoder pages {node.storage.page_owner} left in use"
        for node in self.prefill_nodes:
            if node.runs:
                node.drain()
                assert len(node.messenger._attempts) == 0, "attempts left open"
                assert node.storage.balanced, (
                    f"prefiller pages {node.storage.page_owner} left in use"
                )

    # --- Checks ---

    def note_message(self, conn: Connection, end: int, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError:
            return  # a scenario forges it
        node = next((n for n in self.decode_nodes if n.transfer is conn.ends[end]), None)
        if isinstance(message, PrefillRequest) and node is not None:
            pages, imm, first_rank = message.page_indices, message.imm, message.dp_rank * node.tp
            used = {imm for (_, imm), asked in self.asked.items() if asked.node is node}
            assert imm not in used, f"imm {imm} reused"
            self.asked[id(conn), imm] = Asked(
                node=node,
                attempt=message.attempt_id,
                pages=set(pages),
                slot=message.tail_slot,
                ranks=range(first_rank, first_rank + node.tp),
                expected_count=message.expected_count,
            )

    def check_write(self, write: Write) -> None:
        """As a write lands: is the place still the attempt's, is the source still the job's?"""
        writer = write.conn.ends
        reader = next((node for node in self.decode_nodes if node.transfer in writer), None)
        if reader is None:
            return  # into a stranger's memory
        source_node = next(n for n in self.prefill_nodes if n.transfer in writer)
        asked = self.asked[id(write.conn), write.imm]
        layout, held, end = reader.storage.layout, reader.storage, write.offset + len(write.source)
        if write.region == TAIL_REGION:
            slot = write.offset // SLOT_BYTES
            assert slot == asked.slot, f"a tail landed in slot {slot}, not in {asked.slot}"
            assert held.slot_owner[slot] == asked.attempt, f"a tail landed in freed slot {slot}"
        else:
            rank = write.region - FIRST_KV_REGION
            assert rank in asked.ranks, f"a write for {asked.ranks} landed on rank {rank}"
            page = write.offset // layout.page_bytes % layout.num_pages
            inside = write.offset % layout.page_bytes
            assert inside + len(write.source) <= layout.page_bytes, "a write leaves its page"
            assert page in asked.pages, f"a write landed in foreign page {page}"
            owner = held.page_owner[page]
            assert owner == asked.attempt, (
                f"a write of attempt {asked.attempt} landed in page {page}, now {owner}'s"
            )
        place = {(write.region, byte) for byte in range(write.offset, end)}
        assert not place & asked.landed, f"{place & asked.landed} were written twice"
        asked.landed |= place
        asked.num_writes += 1
        self.wrote.add(write.source_region - FIRST_KV_REGION)
        if write.region == TAIL_REGION and self.forge_tails:
            write.source = write.source.copy()
            write.source[0] ^= 0xFF
        source = source_node.storage
        if write.source_region == TAIL_REGION:
            owner = source.slot_owner[write.source_offset // SLOT_BYTES]
        else:
            page = write.source_offset // source.layout.page_bytes
            owner = source.page_owner[page % source.layout.num_pages]
        assert owner is not None, f"{source_node.address} freed the source of {place} too early"
