"""More scenarios of the protocol: rare interleavings, lies, and waits that must end.

Like `protocol_scenarios.py`, whose list they extend.
"""

from __future__ import annotations

import random

import msgspec

from disagg.messenger.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Heartbeat,
    Message,
    PrefillRequest,
    PrefillStopped,
    Role,
    decode,
    encode,
)
from disagg.transfer.interface import MessageReceived, PeerLost
from tests.adversarial import Connection, Write
from tests.protocol_scenarios import Scenario, Stranger, connected, ends, peers_of
from tests.protocol_world import CONFIG, IDENTITY, NUM_LAYERS, Code, World


def starved_is_not_silence(code: Code) -> None:
    """Rule 5: what lay unread while the whole host stood still is nobody's silence."""
    world = connected(13, code)
    for _ in range(5):
        world.now += 3 * CONFIG.peer_timeout
        world.run_fairly(1.0)
    assert len(world.links) == 1, f"a starved look was taken for silence: {world.links}"


def unanswered_cancel_ends_with_a_fence(code: Code) -> None:
    """Rule 3's last resort: a peer that beats, but answers no Cancel, is fenced in the end."""
    world = connected(14, code)
    node = world.prefill_nodes[0]
    node.stuck = True
    client = world.submit(12)
    world.run_fairly(0.3)
    hear = node.messenger._on_word
    node.messenger._on_word = lambda peer, said: isinstance(said, Cancel) or hear(peer, said)
    world.cancel(client)
    world.run_fairly(CONFIG.request_timeout - 1.0)
    assert not world.decode_node.storage.balanced, "pages came back without an answer or fence"
    world.run_fairly(2.0)
    assert world.decode_node.storage.balanced, "an unanswered Cancel keeps its pages for ever"
    world.heal()


def say(world: World, attempt: int, *, posted: int | None, rejects: bool = False) -> None:
    """A PrefillStopped for the decoder's attempt, forged in its prefiller's name; with `rejects`
    one more, as if nothing had been posted."""
    messenger = world.decode_node.messenger
    asked = messenger._attempts[attempt]
    lies: list[Message] = [PrefillStopped(attempt_id=attempt, why="lie", posted=posted)]
    if rejects:
        lies.append(PrefillStopped(attempt_id=attempt, why="lie"))
    events = [MessageReceived(peer=asked.peer, data=encode(lie)) for lie in lies]
    world.decode_node.transfer.events += events


def writes_that_never_arrive_end_with_a_fence(code: Code) -> None:
    """Rule 5: waiting for what was posted has an end too, if the peer says more than it posted."""
    world = connected(15, code)
    world.prefill_nodes[0].stuck = True
    client = world.submit(12)
    world.run_fairly(0.3)
    say(world, 1, posted=1)
    ends(world, client, within=1.0)
    world.run_fairly(CONFIG.request_timeout + 1.0)
    assert world.decode_node.storage.balanced, "pages wait for ever for writes that never come"
    world.heal()


def lies_about_posted_end_the_connection_alone(code: Code) -> None:
    """More writes posted than asked for, or more than said before: the peer is dropped."""
    for answers in ((99,), (0, 1), (1, 2), (2**32 - 1,)):
        world = connected(17, code)
        world.prefill_nodes[0].stuck = True
        client = world.submit(8)
        world.run_fairly(0.3)
        for posted in answers:
            say(world, 1, posted=posted)
        world.run_fairly(1.0)
        assert client.ended == "local"
        world.heal()


def rejected_after_posting_is_fenced(code: Code) -> None:
    """Rule 3: "nothing was posted" is no answer of a peer that has told of writes."""
    for seed in range(9):
        world = connected(seed, code)
        client = world.submit(12)
        while not world.prefill_nodes[0].transfer.in_flight:
            world.run(1, tick=0.0)
        world.stop(0)
        count = world.decode_node.messenger._attempts[1].count
        say(world, 1, posted=(count, None, 2**32 - 1)[seed % 3], rejects=True)
        world.run_fairly(1.0)
        assert client.ended == "local"
        assert not world.decode_node.storage.balanced, "freed while its writes are under way"
        assert not world.links[-1][1], f"the liar keeps its connection: {world.links}"
        world.wake(0)
        world.heal()


def a_cancel_near_the_deadline_has_time(code: Code) -> None:
    """A Cancel sent just before the request is too old is answered, not punished."""
    world = connected(16, code)
    world.prefill_nodes[0].stuck = True
    client = world.submit(8)
    world.run_fairly(CONFIG.request_timeout - 0.4)
    world.cancel(client)
    world.decode_node.messenger.poll(0)
    world.now += 0.5
    world.decode_node.messenger.poll(0)
    world.run_fairly(1.0)
    assert len(world.links) == 1, f"the connection paid for it: {world.links}"
    world.heal()


def finished_still_waits_for_the_count(code: Code) -> None:
    """A Cancel of what was posted and completed: pages are free only when all has landed."""
    for seed in range(10):
        world = connected(seed, code)
        client = world.submit(12)
        node, decoder = world.prefill_nodes[0], world.decode_node
        conn = world.network.connections[0]

        def deliver(conn: Connection = conn, world: World = world) -> None:
            for end in (0, 1):
                while conn.messages[end]:
                    world.network.deliver(conn, end)

        while node.transfer.next_ticket == 1 or len(node.messenger._attempts):
            deliver()
            happens = [*node.actions(), *node.transfer.medium_actions()]
            happens += [decoder.step, lambda m=decoder.messenger: m.poll(0)]
            world.rng.choice(happens)()
        assert conn.uncounted, "nothing was counted yet"
        world.cancel(client)
        for _ in range(4):
            decoder.messenger.poll(0)
            deliver()
            node.messenger.poll(0)
        decoder.step()
        assert not decoder.storage.balanced, "freed before its writes were counted"
        world.run_fairly(1.0)
        assert decoder.storage.balanced
        assert len(world.links) == 1, f"a late Cancel cost the connection: {world.links}"
        world.heal()


def posted_is_exact(code: Code) -> None:
    """Rule 3: what PrefillStopped says is what lands, to the write."""
    for seed in range(20):
        rng = random.Random(seed)
        world = connected(seed, code)
        imms: dict[int, int] = {}
        said: dict[int, int] = {}
        landed: dict[int, int] = {}
        check, note = world.network.on_write_lands, world.network.on_message_sent

        def on_land(write: Write, check=check, landed=landed) -> None:
            check(write)
            landed[write.imm] = landed.get(write.imm, 0) + 1

        def on_sent(conn: Connection, end: int, data: bytes, note=note, imms=imms, said=said):
            note(conn, end, data)
            match decode(data):
                case PrefillRequest() as request:
                    imms[request.attempt_id] = request.imm
                case PrefillStopped() as answer:
                    said[imms[answer.attempt_id]] = answer.posted

        world.network.on_write_lands, world.network.on_message_sent = on_land, on_sent
        for _ in range(6):
            client = world.submit(rng.randint(2, 14))
            world.run(rng.randint(5, 60))
            if rng.random() < 0.6:
                world.cancel(client)
            if rng.random() < 0.3:
                world.reject_write(0)
        world.heal()
        for imm, posted in said.items():
            assert landed.get(imm, 0) == posted, f"said {posted}, {landed.get(imm, 0)} landed"


def retries_end(code: Code) -> None:
    """Rule 9: when every try fails, the decoder computes by itself; with no prefiller, too."""
    world = connected(19, code, on_failure="retry")
    node = world.prefill_nodes[0]
    client = world.submit(8)
    for _ in range(40):
        node.transfer.reject_after = 0
        world.run_fairly(0.1, tick=0.1)
    assert client.ended == "local", client.ended
    world.kill(0)
    world.run_fairly(CONFIG.peer_timeout)
    alone = world.submit(8)
    ends(world, alone, within=CONFIG.peer_timeout + 1.0)
    assert alone.ended == "local", alone.ended
    node.transfer.reject_after = -1
    world.heal()


def a_failure_after_the_answer_is_fenced(code: Code) -> None:
    """Rule 3: a posted write that fails after PrefillStopped makes that number wrong: fence."""
    seen = 0
    for seed in range(25):
        world = connected(seed, code)
        client = world.submit(12)
        node, transfer = world.prefill_nodes[0], world.prefill_nodes[0].transfer
        while not transfer.in_flight and client.ended is None:
            world.run(1, tick=0.0)
        if client.ended is not None:
            continue
        conn = world.network.connections[0]
        end = conn.ends.index(transfer)
        world.cancel(client)
        world.decode_node.messenger.poll(0)  # Cancel leaves
        while conn.messages[end]:
            world.network.deliver(conn, end)
        node.messenger.poll(0)  # PrefillStopped leaves; writes are still in flight
        if not transfer.in_flight:
            continue
        world.fail_write(0)
        world.run_fairly(1.0)
        assert world.decode_node.storage.balanced, "waits for a write that failed after the answer"
        seen += 1
        world.heal()
    assert seen > 5, seen


def loss_of_one_prefiller_leaves_the_others(code: Code) -> None:
    """One prefiller's end and fence touch no attempt of another's."""
    for seed in range(5):
        world = connected(seed, code, num_prefillers=2)
        for node in world.prefill_nodes:
            node.stuck = True
        clients = [world.submit(8), world.submit(8)]
        world.run_fairly(0.3)
        attempts = dict(world.decode_node.messenger._attempts)
        assert attempts[1].peer != attempts[2].peer
        index = peers_of(world).index(attempts[1].peer)
        world.kill(index)
        world.run_fairly(1.0)
        assert clients[0].ended == "local" and clients[1].ended is None
        world.prefill_nodes[1 - index].stuck = False
        ends(world, clients[1], within=4.0)
        assert clients[1].ended == "ready"
        world.heal()


def a_fence_frees_its_own_connection_alone(code: Code) -> None:
    """Two prefillers stopped in the middle of a copy; one dies: only its pages come back."""
    tried = 0
    for seed in range(8):
        world = connected(seed, code, num_prefillers=2)
        clients = [world.submit(12), world.submit(12)]
        nodes = world.prefill_nodes
        for _ in range(400):
            for i, node in enumerate(nodes):
                if node.transfer.in_flight:
                    world.stop(i)
            if all(node.transfer.in_flight for node in nodes):
                break
            world.run(1, tick=0.0)
        else:
            continue
        tried += 1
        for client in clients:
            world.cancel(client)
        world.run_fairly(CONFIG.request_timeout + 2 * CONFIG.peer_timeout)
        world.kill(0)
        world.run_fairly(1.0)
        assert len(world.decode_node.messenger._attempts) == 1, "one fence freed both"
        world.wake(1)
        world.heal()
    assert tried > 1, tried


def lost_peers_leave_nothing(code: Code) -> None:
    """Rule 8: after a loss neither messenger remembers, beats or counts for the old connection."""
    world = connected(20, code)
    world.prefill_nodes[0].stuck = True
    client = world.submit(8)
    world.run_fairly(0.3)
    for _ in range(3):
        world.cut()
        world.run_fairly(1.5)
    world.prefill_nodes[0].stuck = False
    world.heal()
    assert client.ended == "local"
    prefiller, decoder = world.prefill_nodes[0].messenger, world.decode_node.messenger
    assert len(prefiller._links) == 1, "a lost decoder is still greeted"
    assert len(prefiller._silence) == len(decoder._silence) == 1
    assert not world.decode_node.transfer.counter._waiting
    assert not prefiller._attempts


def ask_raw(world: World, request: Message) -> list[Message] | None:
    """Say it to prefiller 0 in the decoder's name; its answers, or None if it hung up."""
    conn = next(c for c in world.network.connections if not any(c.lost))
    node = world.prefill_nodes[0]
    end = conn.ends.index(node.transfer)
    node.transfer.events.append(MessageReceived(peer=conn.peers[end], data=encode(request)))
    node.messenger.poll(0)
    answers = [decode(data) for data in conn.messages[1 - end]]
    conn.messages[1 - end].clear()
    return None if conn.lost[end] else [a for a in answers if not isinstance(a, Heartbeat)]


def requests_that_make_no_sense_are_rejected(code: Code) -> None:
    """Rules 2 and 10: whatever would write a wrong place or number is refused before it starts."""
    world = connected(21, code)
    node = world.prefill_nodes[0]
    node.stuck = True
    fine = PrefillRequest(
        attempt_id=1,
        token_ids=tuple(range(8)),
        page_indices=(0, 1, 2),
        tail_slot=0,
        imm=900,
        expected_count=3 * NUM_LAYERS + 1,
        dp_rank=0,
    )
    wrongs: tuple[dict[str, object], ...] = (
        {"token_ids": (1,)},
        {"page_indices": (0, 1)},
        {"page_indices": (0, 1, 1)},
        {"page_indices": (0, 1, 16)},
        {"tail_slot": 3},
        {"imm": 0},
        {"imm": 2**32},
        {"expected_count": 9},
        {"expected_count": 11},
        {"dp_rank": 1},
    )
    for wrong in wrongs:
        answers = ask_raw(world, msgspec.structs.replace(fine, **wrong))
        refused = answers is None or [type(a).__name__ for a in answers] == ["PrefillStopped"]
        assert refused and not len(node.messenger._attempts), f"{wrong} was taken: {answers}"
        world.run_fairly(1.0)
    assert ask_raw(world, fine) == [] and len(node.messenger._attempts) == 1
    assert ask_raw(world, fine) is None, "asked twice under one id"
    world.run_fairly(1.0)
    hello = msgspec.structs.replace(world.decode_node.messenger.hello, epoch=99)
    assert ask_raw(world, hello) is None, "a second Hello was taken"
    world.run_fairly(1.0)
    node.stuck = False
    world.heal()


def deeply_nested_message_is_malformed(code: Code) -> None:
    """A message that is nothing but brackets ends its connection, on either side."""
    head = bytes((PROTOCOL_VERSION,)) + b"\x82\xa4type\xa9Heartbeat\xa1x"
    deep = head + b"\x91" * 100_000 + b"\x01"
    world = connected(22, code)
    conn = world.network.connections[0]
    for end in (0, 1):
        conn = next(c for c in world.network.connections if not any(c.lost))
        conn.ends[end].events.append(MessageReceived(peer=conn.peers[end], data=deep))
        world.run_fairly(2.0)
        assert all(conn.lost), "a malformed message was taken"
        after = world.submit(5)
        ends(world, after, within=2.0)
        assert after.ended == "ready"


def beats_are_no_greeting(code: Code) -> None:
    """Rule 5: who listens and never says Hello is given up, whether it is silent or beats."""
    for beats in (False, True):
        world = World(25, code=code)
        node = world.prefill_nodes[0]
        node.messenger._on_message = lambda *_: None
        until = world.now + CONFIG.peer_timeout + 1.0
        while world.now < until and not world.links:
            world.run_fairly(0.1, tick=0.1)
            conn = world.network.connections[0]
            beat = encode(Heartbeat(clock_ns=1))
            if beats and not any(conn.lost):
                node.transfer.send(conn.peers[conn.ends.index(node.transfer)], beat)
        assert world.links, "waits for ever for a Hello"
        assert ("expected one Hello, and first" if beats else "silent for") in world.links[0][2]


def another_release_is_refused_at_once(code: Code) -> None:
    """Two that cannot read each other's messages do not wait for each other's silence."""
    world = connected(27, code)
    stranger = Stranger(world)
    hello = encode(stranger.hello(Role.DECODER))
    for _ in range(2):  # its Hello; then it says that it cannot read our Goodbye
        stranger.transfer.send(stranger.peer, bytes((PROTOCOL_VERSION + 1,)) + hello[1:])
        heard = stranger.hear()
    assert any(isinstance(event, PeerLost) for event in heard), heard


def a_second_name_is_not_a_second_prefiller(code: Code) -> None:
    """Rule 8: one prefiller under two addresses does not end its own connections for ever."""
    world = World(23, code=code, num_prefillers=2)
    world.kill(1)
    world.network.listeners["host", 1] = world.prefill_nodes[0].transfer
    world.run_fairly(10.0)
    losses = [link for link in world.links if not link[1]]
    assert len(losses) <= 4, f"{len(losses)} losses in 10 s: {losses[:2]}"


def refused_pairs_ask_less_and_less_often(code: Code) -> None:
    """A pair that can never work does not fill both logs."""
    other = msgspec.structs.replace(IDENTITY, num_layers=9)
    world = World(24, code=code, prefiller_identity=other)
    world.run_fairly(60.0)
    assert len(world.links) < 40, f"{len(world.links)} reports in a minute"


def exposed_transfer_is_told(code: Code) -> None:
    """How long the last write came after the forward pass, although the clocks differ."""
    for seed in range(8):
        world = World(seed, code=code)
        world.run_fairly(2e-8, tick=1e-9)  # up, and no time for a regular beat
        transfer, posts = world.prefill_nodes[0].transfer, []
        write_pages = transfer.write_pages

        def noting(*call, world=world, posts=posts, write_pages=write_pages):
            posts.append(world.now)
            return write_pages(*call)

        transfer.write_pages = noting
        for _ in range(4):
            del posts[:]
            client = world.submit(14)
            for _ in range(200):
                world.run(20)
                if client.ended is not None:
                    break
            stats, landed = world.moved[-1]
            exposed = landed - world.forward_ends[-1]
            span = max(exposed, landed - posts[0])
            assert abs(stats.exposed - exposed) < 1e-6, f"exposed {stats.exposed}, not {exposed}"
            assert abs(stats.span - span) < 1e-6, f"span {stats.span}, not {span}"


RARITIES: tuple[Scenario, ...] = (
    exposed_transfer_is_told,
    starved_is_not_silence,
    unanswered_cancel_ends_with_a_fence,
    writes_that_never_arrive_end_with_a_fence,
    lies_about_posted_end_the_connection_alone,
    rejected_after_posting_is_fenced,
    a_cancel_near_the_deadline_has_time,
    finished_still_waits_for_the_count,
    posted_is_exact,
    retries_end,
    a_failure_after_the_answer_is_fenced,
    loss_of_one_prefiller_leaves_the_others,
    a_fence_frees_its_own_connection_alone,
    lost_peers_leave_nothing,
    requests_that_make_no_sense_are_rejected,
    deeply_nested_message_is_malformed,
    beats_are_no_greeting,
    another_release_is_refused_at_once,
    a_second_name_is_not_a_second_prefiller,
    refused_pairs_ask_less_and_less_often,
)
