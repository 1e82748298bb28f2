"""Scenarios for both messengers, one or more for each rule that keeps the hand-over safe.

Each takes the classes under test, so that `test_protocol.py` runs them on the real code and
`test_wrong_variants.py` sees them catch the wrong variants. AssertionError: a rule was broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import numpy as np

from disagg.kv_layout import PageOrder
from disagg.messenger.messages import (
    MAX_PROBE_PAGES,
    PROTOCOL_VERSION,
    Cancel,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    PrefillRequest,
    PrefillStopped,
    ProbeRequest,
    Role,
    decode,
    encode,
    probe_pattern,
)
from disagg.transfer.interface import ImmReached, Memory, MessageReceived, PeerLost
from tests.adversarial import FakeTransfer
from tests.protocol_world import (
    CONFIG,
    IDENTITY,
    NUM_LAYERS,
    PAGE_SIZE,
    Client,
    Code,
    Shards,
    World,
)

Scenario = Callable[[Code], None]


def connected(seed: int, code: Code, **settings) -> World:
    """A world whose links are up."""
    world = World(seed, code=code, **settings)
    world.run_fairly(1.0)
    num_links = len(world.prefill_nodes) * len(world.decode_nodes)
    assert len(world.links) == num_links, f"links did not come up: {world.links}"
    return world


def peers_of(world: World) -> list[int]:
    """The prefillers to which the decoder is linked, in the order of their nodes."""
    messenger = world.decode_node.messenger
    return [p.peer for p in messenger._prefillers if p.peer in messenger._greeted]


def ends(world: World, client: Client, *, within: float) -> float:
    """Run fairly until the client is answered; returns how long that took."""
    start = world.now
    while client.ended is None:
        assert world.now - start < within, f"not answered within {within} s"
        world.run_fairly(0.1, tick=0.1)
    return world.now - start


def without_faults(code: Code) -> None:
    """Delays and shuffles alone fail nothing: every request is ready, idle time included."""
    for seed in range(25):
        world = connected(seed, code, num_prefillers=1 + seed % 2)
        for _ in range(5):
            world.submit(world.rng.randint(2, 14))
            world.run(80)
            if world.rng.random() < 0.3:
                world.cancel(world.rng.choice(world.clients))
        world.heal()
        assert not world.failures, world.failures
        assert {client.ended for client in world.clients} <= {"ready", "cancelled"}


def cancels_cross_everything(code: Code) -> None:
    """Rule 3: each request is cancelled when it is about to be ready, or just was."""
    for seed in range(24):
        world = connected(seed, code)
        for _ in range(8):
            client = world.submit(world.rng.randint(2, 14))
            world.run(world.rng.randint(60, 220))
            world.cancel(client)
        world.heal()
        assert not world.failures, world.failures


def chaos(code: Code, seeds: range = range(60)) -> None:
    """All faults at once, in random order."""
    for seed in seeds:
        rng = random.Random(seed)
        policy = rng.choice(["local", "retry", "fail"])
        world = connected(seed, code, num_prefillers=rng.choice([1, 2]), on_failure=policy)
        rate = rng.choice([0.2, 1.0])
        for _ in range(25):
            world.run(rng.randint(5, 60), tick=rng.choice([0.01, 0.02, 0.2]))
            if rng.random() < 0.4:
                world.submit(rng.randint(2, 14))
            elif world.clients and rng.random() < 0.3:
                world.cancel(rng.choice(world.clients))
            if rng.random() < rate:
                fault(world, rng)
        world.heal(wake=rng.random() < 0.8)


#: Heads, ranks of the prefiller, ranks of each decoder, data-parallel groups of each decoder.
PAIRS = (
    (2, 2, (2,), 1),
    (4, 4, (2,), 1),
    (4, 2, (4, 1), 1),
    (6, 3, (2, 6), 1),
    (2, 4, (1, 2, 4), 1),
    (1, 3, (2,), 1),
    (1, 1, (1,), 3),
    (2, 1, (2,), 2),
)


def ranks_that_shard_differently(code: Code) -> None:
    """Every byte of every rank's pages comes once and is the right one, and no rank sits idle."""
    for seed, (num_kv_heads, prefill_tp, decode_tps, decode_dp) in enumerate(PAIRS * 2):
        world = connected(
            seed,
            code,
            shards=Shards(
                order=PageOrder.HND if seed < len(PAIRS) else PageOrder.NHD,
                num_kv_heads=num_kv_heads,
                prefill_tp=prefill_tp,
                decode_tps=decode_tps,
                decode_dp=decode_dp,
            ),
        )
        for _ in range(8):
            for node in world.decode_nodes:
                world.submit(world.rng.randint(2, 11), node)
        world.heal()
        assert {client.ended for client in world.clients} == {"ready"}, world.failures
        idle = set(range(prefill_tp)) - world.wrote
        assert not idle, f"ranks {idle} of the prefiller wrote nothing"


def ranks_in_chaos(code: Code) -> None:
    """What holds for one rank a node holds for several: faults, cancels, what was posted."""
    for seed, (num_kv_heads, prefill_tp, decode_tps, decode_dp) in enumerate(PAIRS):
        rng = random.Random(seed)
        shards = Shards(
            order=PageOrder.NHD if seed % 2 else PageOrder.HND,
            num_kv_heads=num_kv_heads,
            prefill_tp=prefill_tp,
            decode_tps=decode_tps,
            decode_dp=decode_dp,
        )
        world = connected(seed, code, num_prefillers=2, on_failure="retry", shards=shards)
        for _ in range(6):
            world.submit(rng.randint(2, 8), rng.choice(world.decode_nodes))
            world.run(rng.randint(20, 300))
            if rng.random() < 0.5:
                world.cancel(rng.choice(world.clients))
            if rng.random() < 0.5:
                fault(world, rng)
        world.heal()


def ranks_that_cannot_share_are_refused(code: Code) -> None:
    """Rule 2: by name, with both values and the number of heads."""
    world = connected(17, code, shards=Shards(num_kv_heads=6, prefill_tp=3, decode_tps=(2,)))
    for tp, num_regions in ((4, 4), (5, 5), (2, 3), (2, 0)):
        stranger = Stranger(world)
        regions = (stranger.region.descriptor,) * num_regions
        heard = stranger.hear(stranger.hello(Role.DECODER, tp=tp, kv_regions=regions))
        [why] = [message.why for message in heard if isinstance(message, Goodbye)]
        assert f"prefiller 3, decoder {tp} for 6 KV heads and {num_regions} KV regions" in why, why


def fault(world: World, rng: random.Random) -> None:
    """One of the faults."""
    index = rng.randrange(len(world.prefill_nodes))
    rng.choice(
        [
            lambda: world.stop(index),
            lambda: world.wake(index),
            lambda: world.restart(index),
            lambda: world.kill(index),
            world.cut,
            lambda: world.fail_write(index),
            lambda: world.reject_write(index),
        ]
    )()


def each_difference_is_refused(code: Code) -> None:
    """Rule 2: every field of the identity, by its name, with both values, within a second."""
    for field in IDENTITY.__struct_fields__:
        value = getattr(IDENTITY, field)
        other = value + 1 if isinstance(value, int) else f"other {value}"
        identity = msgspec.structs.replace(IDENTITY, **{field: other})
        world = World(1, code=code, prefiller_identity=identity)
        world.run_fairly(1.0)
        assert world.links, f"{field}: nothing was said within a second"
        assert not any(ready for _, ready, _ in world.links), f"{field} was not refused"
        why = world.links[0][2]
        assert field in why and str(value) in why and str(other) in why, why


def silence_ends_a_request(code: Code) -> None:
    """Rule 5: a stopped peer is given up after peer_timeout, long before request_timeout."""
    world = connected(2, code)
    client = world.submit(8)
    world.prefill_nodes[0].stuck = True
    world.run_fairly(0.5)
    world.stop(0)
    took = ends(world, client, within=CONFIG.peer_timeout + 1.0)
    assert took > CONFIG.peer_timeout / 2, "given up before it was silent for long"
    world.heal()


def queueing_is_not_silence(code: Code) -> None:
    """Rule 5: a peer that beats may take longer than peer_timeout, but not than request_timeout."""
    world = connected(3, code)
    world.prefill_nodes[0].stuck = True
    slow = world.submit(8)
    world.run_fairly(CONFIG.request_timeout - 1.0)
    assert slow.ended is None, f"queueing was taken for silence: {world.failures}"
    world.prefill_nodes[0].stuck = False
    ends(world, slow, within=1.0)
    assert slow.ended == "ready"
    world.prefill_nodes[0].stuck = True
    stuck = world.submit(8)
    ends(world, stuck, within=CONFIG.request_timeout + 1.0)
    assert stuck.ended == "local"
    world.heal()


def lost_write_is_told(code: Code) -> None:
    """Rule 6: a write that cannot be posted, or fails, ends the attempt by a message at once."""
    for seed in range(12):
        world = connected(seed, code)
        client = world.submit(12)
        if seed % 2:
            world.reject_write(0)
        else:
            node = world.prefill_nodes[0].transfer
            while not node.in_flight and client.ended is None:
                world.run(1)
            world.fail_write(0)
        ends(world, client, within=1.5)
        world.heal()


def cancel_gives_back_soon(code: Code) -> None:
    """Rule 3: a cancelled attempt's pages come back as soon as what was posted has arrived."""
    for seed in range(12):
        world = connected(seed, code)
        client = world.submit(12)
        world.run(seed * 12)
        world.prefill_nodes[0].stuck = seed % 2 == 0
        if client.ended is None:
            world.cancel(client)
            world.run_fairly(1.0)
            assert world.decode_node.storage.balanced, "a cancelled attempt keeps its pages"
        world.heal()
        assert not world.failures, world.failures


def silent_decoder_is_given_up(code: Code) -> None:
    """Rule 5, the other way: a decoder that says nothing more keeps no source pages."""
    world = connected(12, code)
    node = world.prefill_nodes[0]
    node.stuck = True
    world.submit(8)
    world.run_fairly(0.3)
    assert len(node.messenger._attempts) == 1
    for _ in range(20):
        world.now += CONFIG.peer_timeout / 10
        node.messenger.poll(0)
    assert len(node.messenger._attempts) == 0, "a silent decoder keeps its attempts"


def foreign_tail_is_seen(code: Code) -> None:
    """Rule 7: a tail slot that carries another attempt's id fails that request only."""
    world = connected(4, code)
    world.forge_tails = True
    client = world.submit(8)
    ends(world, client, within=2.0)
    assert client.ended == "local", f"a foreign tail was taken: {client.ended}"
    world.forge_tails = False
    after = world.submit(8)
    ends(world, after, within=2.0)
    assert after.ended == "ready"
    world.heal()


def same_process_replaces_its_connection(code: Code) -> None:
    """Rule 8: a second connection with the same epoch ends the first, and its attempts."""
    world = connected(5, code)
    node = world.prefill_nodes[0]
    node.stuck = True
    world.submit(8)
    world.run_fairly(0.3)
    assert len(node.messenger._attempts) == 1
    conn = world.network.connections[0]
    end = conn.ends.index(node.transfer)
    decoder = world.decode_node
    hello = decoder.messenger.hello
    node.transfer.events.append(MessageReceived(peer=99, data=encode(hello)))
    node.messenger.poll(0)
    assert conn.lost[end], "two connections of one process live side by side"
    node.messenger.poll(0)
    assert len(node.messenger._attempts) == 0


def restarted_prefiller_serves_again(code: Code) -> None:
    """Rule 8: after a restart on the same address the next requests are served, as if new."""
    world = connected(6, code, on_failure="retry")
    first = world.submit(10)
    world.run(40)
    world.restart(0)
    ends(world, first, within=CONFIG.peer_timeout + 2.0)
    for _ in range(5):
        client = world.submit(10)
        ends(world, client, within=2.0)
        assert client.ended == "ready", client.ended
    assert len(world.failures) <= 1, world.failures
    world.heal()


def answers_of_others_do_not_count(code: Code) -> None:
    """Rules 1 and 8: only the asked peer, naming the whole attempt id, ends an attempt."""
    world = connected(7, code, num_prefillers=2)
    for node in world.prefill_nodes:
        node.stuck = True
    client = world.submit(8)
    world.run_fairly(0.3)
    messenger, transfer = world.decode_node.messenger, world.decode_node.transfer
    attempt = messenger._attempts[1]
    other = next(peer for peer in peers_of(world) if peer != attempt.peer)
    for peer, number in ((other, 1), (attempt.peer, 1 << 40 | 1)):
        forged = PrefillStopped(attempt_id=number, permanent=True, why="forged")
        transfer.events.append(MessageReceived(peer=peer, data=encode(forged)))
        world.run_fairly(0.3)
        assert client.ended is None, f"an answer from peer {peer} about {number:#x} counted"
    transfer.counter.count(other, attempt.imm, attempt.count)
    world.run_fairly(0.3)
    assert client.ended is None, "writes of another peer were counted"
    for node in world.prefill_nodes:
        node.stuck = False
    world.heal()
    assert client.ended == "ready"


def policy_is_followed(code: Code) -> None:
    """Rule 9: local, retry (elsewhere first) and fail."""
    for policy, expected in (("local", "local"), ("retry", "ready"), ("fail", "fail")):
        world = connected(8, code, num_prefillers=2, on_failure=policy)
        for node in world.prefill_nodes:
            node.stuck = True
        client = world.submit(8)
        world.run_fairly(0.3)
        asked = world.decode_node.messenger._attempts[1].peer
        index = peers_of(world).index(asked)
        other = world.prefill_nodes[1 - index]
        if policy == "retry":  # the first one fails but stays connected: a choice is left
            world.prefill_nodes[index].transfer.reject_after = 0
            world.prefill_nodes[index].stuck = False
        else:
            world.kill(index)
        other.stuck = False
        ends(world, client, within=CONFIG.peer_timeout + 2.0)
        assert client.ended == expected, f"{policy}: {client.ended}"
        assert other.num_asked == (policy == "retry"), "retried on the one that failed"
        world.heal()


def never_is_not_later(code: Code) -> None:
    """Rule 10: what can never fit is refused at once, by the prefiller too; the next runs."""
    world = connected(9, code, prefill_pages=2)
    too_long = world.submit(2 * PAGE_SIZE + 2)
    ends(world, too_long, within=0.5)
    assert too_long.ended == "fail", too_long.ended
    assert "2" in world.failures[0] and "pages" in world.failures[0], world.failures
    fitting = world.submit(2 * PAGE_SIZE + 1)
    ends(world, fitting, within=2.0)
    assert fitting.ended == "ready"
    # A decoder that asks all the same hears it from the prefiller.
    conn = world.network.connections[0]
    node = world.prefill_nodes[0]
    end = conn.ends.index(node.transfer)
    request = PrefillRequest(
        attempt_id=77,
        token_ids=tuple(range(12)),
        page_indices=(0, 1, 2, 3),
        tail_slot=0,
        imm=9999,
        expected_count=NUM_LAYERS * 4 + 1,
        dp_rank=0,
    )
    node.transfer.events.append(MessageReceived(peer=conn.peers[end], data=encode(request)))
    node.messenger.poll(0)
    answers = [decode(data) for data in conn.messages[1 - end]]
    rejected = [answer for answer in answers if isinstance(answer, PrefillStopped)]
    assert rejected and rejected[0].permanent, answers
    conn.messages[1 - end].clear()
    world.heal()


def counter_may_jump(code: Code) -> None:
    """A starved poller sees the counter pass whole steps, with two requests' chunks in one."""
    for seed in range(10):
        world = connected(seed, code)
        node = world.prefill_nodes[0]
        node.stuck = True
        clients = [world.submit(7), world.submit(8)]
        world.run_fairly(0.3)
        node.stuck = False
        together = False
        while any(job.done < len(job.tokens) - 1 for job in node.jobs.values()) or not node.jobs:
            node.start_step()  # the messenger sees nothing of this while it runs
            together |= len(node.chunks or ()) == 2
            while node.chunks is not None:
                node.compute_layer()
        ends(world, clients[0], within=1.0)
        ends(world, clients[1], within=1.0)
        assert {client.ended for client in clients} == {"ready"}
        assert together or seed != 0, "choose a seed where both chunks share a step"
        world.heal()


def unknown_cancels_are_harmless(code: Code) -> None:
    """Cancel before the request was sent, twice, after the last write, for an id never seen."""
    world = connected(10, code)
    early = world.submit(8)
    world.decode_node.step()
    world.cancel(early)
    world.decode_node.messenger.on_cancel(early.attempt)
    world.decode_node.messenger.on_cancel(4242)
    peer = peers_of(world)[0]
    world.decode_node.transfer.send(peer, encode(Cancel(attempt_id=4242)))
    late = world.submit(8)
    ends(world, late, within=2.0)
    world.decode_node.messenger.on_cancel(late.attempt)
    world.decode_node.transfer.send(peer, encode(Cancel(attempt_id=1)))
    world.heal()
    assert late.ended == "ready" and not world.failures, world.failures


def cancelled_while_stopped(code: Code) -> None:
    """A prefiller stopped in the middle of a copy while its request is cancelled: then woken,
    killed, or never seen again. The client is answered at once; pages come back when it is safe."""
    for fate in ("woken", "killed", "never"):
        for seed in range(8):
            world = connected(seed, code)
            client = world.submit(12)
            transfer = world.prefill_nodes[0].transfer
            while not transfer.in_flight:
                world.run(1, tick=0.0)
            world.stop(0)
            world.cancel(client)
            assert client.ended == "cancelled"
            world.run_fairly(CONFIG.request_timeout + 2 * CONFIG.peer_timeout)
            assert not world.decode_node.storage.balanced, "pages came back under a stopped copy"
            assert world.stuck == [1], "others wait for its pages for ever"
            other = world.submit(4)
            ends(world, other, within=1.0)
            assert other.ended == "local"
            if fate == "woken":
                world.wake(0)
            elif fate == "killed":
                world.kill(0)
            world.heal(wake=fate != "never")


def a_limit_of_now_is_not_never(code: Code) -> None:
    """Rule 10: a prompt beyond what a prefiller takes at once follows the policy, here local."""
    world = connected(13, code, max_open_attempts=1)
    world.prefill_nodes[0].stuck = True
    first, second = world.submit(5), world.submit(5)
    ends(world, second, within=1.0)
    assert second.ended == "local", second.ended
    assert len(world.decode_node.transfer.counter._waiting) == 1, "a rejected imm still counts"
    world.prefill_nodes[0].stuck = False
    ends(world, first, within=2.0)
    assert first.ended == "ready"
    world.heal()


def what_the_engine_refuses_is_told(code: Code) -> None:
    """Rule 10: what the prefiller's engine can never compute comes back as a refusal."""
    world = connected(14, code)
    world.prefill_nodes[0].refuses = True
    client = world.submit(5)
    ends(world, client, within=1.0)
    assert client.ended == "fail" and "no such token" in world.failures[0], world.failures
    world.prefill_nodes[0].refuses = False
    after = world.submit(5)
    ends(world, after, within=2.0)
    assert after.ended == "ready"
    world.heal()


class Stranger:
    """A peer of a prefiller that says what it likes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transfer = FakeTransfer(world.network, "stranger")
        self.target = np.zeros(256, np.uint8)
        memory = Memory(address=self.target.ctypes.data, nbytes=self.target.nbytes)
        self.region = self.transfer.register(memory)
        self.peer = self.transfer.connect(*world.prefill_nodes[0].address)

    def hello(self, role: Role, **changes) -> Hello:
        hello = Hello(
            epoch=5_000_000,
            role=role,
            identity=None if role == Role.PROBE else self.world.identity,
            num_pages=8,
            num_tail_slots=2,
            tp=1,
            kv_regions=() if role == Role.PROBE else (self.region.descriptor,),
            tail_region=self.region.descriptor,
        )
        return msgspec.structs.replace(hello, **changes)

    def hear(self, *messages: Message) -> list[object]:
        """What comes back when these are said."""
        for message in messages:
            self.transfer.send(self.peer, encode(message))
        self.world.run_fairly(0.3, tick=0.1)
        return [
            decode(event.data) if isinstance(event, MessageReceived) else event
            for event in self.transfer.poll(0)
        ]


def probe_is_served(code: Code) -> None:
    """A node without a model proves the path: so many writes of such a size, and no more."""
    world = connected(15, code)
    probe = Stranger(world)
    assert any(type(m).__name__ == "Hello" for m in probe.hear(probe.hello(Role.PROBE)))
    probe.transfer.expect(probe.peer, 7, 4)
    probe.target[:] = 0xEE
    wanted = ProbeRequest(page_bytes=32, num_pages=4, imm=7)
    assert ImmReached(imm=7) in probe.hear(wanted)
    assert (probe.target[:128] == probe_pattern()[:128]).all() and (
        probe.target[128:] == 0xEE
    ).all()
    for changes, why in (
        ({"page_bytes": 1 << 30}, "outside its region"),
        ({"num_pages": MAX_PROBE_PAGES + 1}, f"at most {MAX_PROBE_PAGES} pages"),
        ({"num_pages": 9}, "outside its region"),
    ):
        answers = probe.hear(msgspec.structs.replace(wanted, **changes))
        [refused] = [answer for answer in answers if not isinstance(answer, Heartbeat)]
        assert isinstance(refused, PrefillStopped) and why in refused.why, refused
    for changes in ({"imm": 0}, {"page_bytes": 0}, {"num_pages": 0}):
        stranger = Stranger(world)
        stranger.hear(stranger.hello(Role.PROBE))
        ended = stranger.hear(msgspec.structs.replace(wanted, **changes))
        assert any(isinstance(event, PeerLost) for event in ended), ended
    served = world.submit(5)
    ends(world, served, within=2.0)
    assert served.ended == "ready"


def cancels_of_others_do_not_count(code: Code) -> None:
    """A decoder that names another's attempt neither stops it nor starts it once more."""
    world = connected(18, code)
    node = world.prefill_nodes[0]
    node.stuck = True
    client = world.submit(5)
    world.run_fairly(0.3)
    [attempt] = node.messenger._attempts.values()
    stranger = Stranger(world)
    stranger.hear(stranger.hello(Role.DECODER), Cancel(attempt_id=1))
    assert not attempt.is_stopped, "another's Cancel counted"
    assert any(isinstance(heard, PeerLost) for heard in stranger.hear(attempt.request))
    node.stuck = False
    ends(world, client, within=2.0)
    assert client.ended == "ready"
    world.heal()


def forged_messages_end_one_connection(code: Code) -> None:
    """Whatever a peer says ends its own connection or attempt at most; others are served."""
    request = PrefillRequest(
        attempt_id=1,
        token_ids=(1, 2, 3, 4, 5),
        page_indices=(0, 1),
        tail_slot=0,
        imm=3,
        expected_count=2 * NUM_LAYERS + 1,
        dp_rank=0,
    )
    change = msgspec.structs.replace
    conversations: list[tuple[Role, dict, tuple[Message, ...]]] = [
        (Role.DECODER, {}, (change(request, page_indices=(0, 8)),)),
        (Role.DECODER, {}, (change(request, page_indices=(0, 0)),)),
        (Role.DECODER, {}, (change(request, page_indices=(0,)),)),
        (Role.DECODER, {}, (change(request, tail_slot=2),)),
        (Role.DECODER, {}, (change(request, imm=0),)),
        (Role.DECODER, {}, (change(request, expected_count=3),)),
        (Role.DECODER, {}, (change(request, token_ids=(1,)),)),
        (Role.DECODER, {}, (change(request, attempt_id=2**64 - 1),)),
        (Role.DECODER, {}, (request, request)),
        (Role.DECODER, {}, (Cancel(attempt_id=2**64 - 1),)),
        (Role.DECODER, {}, (PrefillStopped(attempt_id=1, why="?", posted=1),)),
        (Role.DECODER, {"num_pages": 2**32 - 1, "num_tail_slots": 2**32 - 1}, (request,)),
        (Role.DECODER, {"kv_regions": ()}, (request,)),
        (Role.DECODER, {"kv_regions": (b"?",), "tail_region": b"?"}, (request,)),
        (Role.DECODER, {"kv_regions": (b"",)}, (request,)),
        (Role.DECODER, {"tp": 2}, (request,)),
        (Role.DECODER, {"tp": 0}, (request,)),
        (Role.DECODER, {"tp": 2**32}, (request,)),
        (Role.PROBE, {"tp": 256}, (request,)),
        (Role.DECODER, {}, (change(request, dp_rank=1),)),
        (Role.DECODER, {}, (change(request, dp_rank=-1),)),
        (Role.DECODER, {"identity": None}, (request,)),
        (Role.DECODER, {"num_pages": 0}, (request,)),
        (Role.PREFILLER, {}, (request,)),
        (Role.PROBE, {}, (request,)),
    ]
    world = connected(16, code)
    for role, changes, messages in conversations:
        stranger = Stranger(world)
        stranger.hear(stranger.hello(role, **changes), *messages)
        world.run_fairly(0.5)
        served = world.submit(5)
        ends(world, served, within=2.0)
        assert served.ended == "ready", f"{role} {changes} {messages}: {world.failures}"
        stranger.transfer.kill()
    stuck = world.prefill_nodes[0]
    for posted in (10**9, None):
        stuck.stuck = True
        client = world.submit(8)
        world.run_fairly(0.3)
        [attempt] = world.decode_node.messenger._attempts.values()
        forged = PrefillStopped(attempt_id=attempt.fetch.attempt, why="forged", posted=posted)
        event = MessageReceived(peer=attempt.peer, data=encode(forged))
        world.decode_node.transfer.events.append(event)
        ends(world, client, within=2.0)
        stuck.stuck = False
        world.run_fairly(1.0)
    world.heal()


def garbage_ends_the_connection_alone(code: Code) -> None:
    """A message that cannot be read, or is out of place, ends that connection and nothing else."""
    world = connected(11, code)
    hello: Hello = world.decode_node.messenger.hello
    peer = peers_of(world)[0]
    no_text = encode(Goodbye(why="??")).replace(b"??", b"\xff\xfe")
    version = bytes((PROTOCOL_VERSION,))
    unknown = version + b"\x81\xa4type\xa3foo"
    for data in (b"", version + b"garbage", b"\x09", encode(hello), unknown, no_text):
        world.decode_node.transfer.send(peer, data)
        world.run_fairly(1.0)
        after = world.submit(5)
        ends(world, after, within=2.0)
        assert after.ended == "ready"
        new_peer = peers_of(world)[0]
        assert new_peer != peer, f"{data!r} was accepted"
        peer = new_peer
    world.heal()


SCENARIOS: tuple[Scenario, ...] = (
    without_faults,
    cancels_cross_everything,
    ranks_that_shard_differently,
    ranks_in_chaos,
    ranks_that_cannot_share_are_refused,
    each_difference_is_refused,
    silence_ends_a_request,
    silent_decoder_is_given_up,
    queueing_is_not_silence,
    cancel_gives_back_soon,
    lost_write_is_told,
    foreign_tail_is_seen,
    same_process_replaces_its_connection,
    restarted_prefiller_serves_again,
    answers_of_others_do_not_count,
    policy_is_followed,
    never_is_not_later,
    counter_may_jump,
    unknown_cancels_are_harmless,
    cancelled_while_stopped,
    garbage_ends_the_connection_alone,
    a_limit_of_now_is_not_never,
    what_the_engine_refuses_is_told,
    probe_is_served,
    cancels_of_others_do_not_count,
    forged_messages_end_one_connection,
    chaos,
)
