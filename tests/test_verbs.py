"""RDMA over fake NICs: the order of things, several NICs, full queues, errors, fences, forgeries.

What every transport must do stands in `test_transfer_conformance.py`; what pyverbs is asked for, in
`test_verbs_device.py`; real queue pairs are in `rdma_vm`.
"""

import contextlib
import gc
import time
from collections import Counter
from functools import partial

import msgspec
import numpy as np
import pytest

from disagg.transfer import verbs
from disagg.transfer.interface import ImmReached, Memory, PeerFenced, PeerLost, TransferError
from disagg.transfer.transfer_engine import TransferEngine
from disagg.transfer.verbs import Depths, VerbsMedium
from disagg.transfer.verbs_device import POLL_COMPLETIONS, RECEIVE, WC
from tests.engines import engine_of, link_of, open_descriptors, write, write_pages
from tests.fake_verbs import Fabric
from tests.test_transfer_conformance import KIB, MIB, Node, World, noise, shuffled

SMALL = Depths(sends=4, send_chain=2, receives=8, receive_chain=4)


@pytest.fixture
def fabric():
    return Fabric()


@pytest.fixture
def world():
    with contextlib.closing(World(None)) as world:
        yield world


@pytest.fixture
def start(world, fabric):
    """Starts a node with so many NICs, or with these."""

    def start(nics=1, *, nbytes=MIB, depths=SMALL, **options):
        if isinstance(nics, int):
            nics = [fabric.nic() for _ in range(nics)]
        engine = engine_of([VerbsMedium(nics, depths)], **options)
        world.nodes.append(Node(engine, nbytes))
        return world.nodes[-1]

    return start


def lanes_of(node, peer):
    return link_of(node, peer)._lanes


def pages(node, peer, target, count, page_bytes, imm, seed=0):
    order = shuffled(count, page_bytes, seed)
    return write_pages(
        node.engine, peer, node.region, target.region.descriptor, page_bytes, order, order, imm
    )


def why(node):
    (lost,) = node.of(PeerLost)
    return lost.why


# --- Opening ---


def test_the_first_writes_come_before_any_message(world, start, fabric):
    """Step by step: a side is ready when its own and the other's are through."""
    left, right = start(), start()
    fabric.held = True
    there = left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    left.engine.send(there, b"hello")
    world.rounds()
    mine = next(iter(lanes_of(left, there))).qp
    other = mine.peer
    assert (len(mine.pending), len(other.pending)) == (1, 0)
    fabric.move()
    world.rounds()
    assert (len(mine.pending), len(other.pending)) == (0, 1)
    assert right.events == []
    assert int(other.pending[0][1]["length"]) >= mine.nic.address.mtu
    fabric.move()
    world.run(lambda: right.events)


def test_the_immediate_of_a_first_write_is_not_counted(world, start):
    left, right = start(), start()
    right.engine.expect(1, 0, 1)
    world.connect(left, right)
    world.rounds()
    assert right.reached == []


@pytest.mark.parametrize("gid", [True, False])
@pytest.mark.parametrize("broken", ["cut", "way_mtu"])
def test_a_way_that_does_not_work_is_named_with_both_ends(world, start, fabric, gid, broken):
    """The way takes less than the ports' MTU, or nothing at all."""
    near, far = fabric.nic(gid=gid, mtu=4096), fabric.nic(gid=gid, mtu=4096)
    left, right = start([near]), start([far])
    if broken == "cut":
        fabric.cut.add(near.name)
    else:
        fabric.way_mtu = 1500
    left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    world.run(lambda: left.of(PeerFenced), seconds=1)
    assert "the first write failed: retry exceeded error; queue pair" in why(left)
    for part in (
        *(f"of {near.name} port 1 ({near.address})", f"at {far.address}", "MTU 4096"),
        *("the peer's is ", "check GID or LID, the MTU of switches, firewalls"),
    ):
        assert part in why(left)
    world.run(lambda: not fabric.queue_pairs)
    assert {type(event) for event in right.events} <= {PeerLost, PeerFenced}


def test_a_smaller_mtu_of_the_ports_is_agreed_upon(world, start, fabric):
    fabric.way_mtu = 1500
    world.connect(start([fabric.nic(mtu=4096)]), start([fabric.nic(mtu=1024)]))


def test_roce_and_infiniband_do_not_meet(world, start, fabric):
    left, right = start([fabric.nic(gid=True)]), start([fabric.nic(gid=False)])
    left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    world.run(lambda: left.of(PeerFenced))
    assert "cannot meet: one is addressed by GID (RoCE), the other by LID" in why(left)


def test_a_step_that_fails_ends_the_connection_with_its_reason(world, start, fabric):
    left, right = start(), start()

    def connect(*_):
        raise TransferError("queue pair 5 cannot get ready to receive: no route")

    queue_pair = right.engine._media[0].nics[0].queue_pair

    def broken_pair(*depths):
        pair = queue_pair(*depths)
        pair.connect = connect
        return pair

    right.engine._media[0].nics[0].queue_pair = broken_pair
    left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    world.run(lambda: left.of(PeerFenced) and right.of(PeerFenced))
    assert "closed the connection" in why(left)
    assert why(right) == "queue pair 5 cannot get ready to receive: no route"


# --- Forged ---


def forged_info(change):
    """An opening with `change(dict of its fields)` applied."""

    def forge(info):
        nics, regions, probe = msgspec.msgpack.decode(info)
        fields = {"nics": nics, "regions": regions, "probe": probe}
        change(fields)
        return msgspec.msgpack.encode(list(fields.values()))

    return forge


def put(name, index, value):
    def change(fields):
        fields[name][index] = value

    return forged_info(change)


@pytest.mark.parametrize(
    "forge",
    [
        lambda info: b"",
        lambda info: b"\xc1nonsense",
        forged_info(lambda fields: fields.update(more=1)),
        forged_info(lambda fields: fields.update(nics=[])),
        forged_info(lambda fields: fields.update(nics=fields["nics"] * 65)),
        put("nics", 0, ["0000", 1, 1024]),
        put("nics", 0, ["", -1, 1024]),
        put("nics", 0, ["", 1 << 16, 1024]),
        put("nics", 0, ["", 1, 1000]),
        put("nics", 0, ["", 1, 1 << 40]),
        put("regions", 0, [-1, 8, [1]]),
        put("regions", 0, [0, -8, [1]]),
        put("regions", 0, [0, 8, []]),
        put("regions", 0, [0, 8, [1, 2]]),
        put("regions", 0, [0, 8, [1 << 32]]),
        put("regions", 0, [0, 8, [-1]]),
        put("regions", 0, [0, 8, [1], 4]),
        put("probe", 1, 4095),
        put("probe", 2, []),
    ],
)
@pytest.mark.parametrize("who", ["dialler", "listener"])
def test_a_forged_opening_ends_the_connection(world, start, fabric, monkeypatch, forge, who):
    left, right = start(), start()
    forger, other = (left, right) if who == "dialler" else (right, left)
    link = forger.engine._media[0].link

    def forging(connection, arrived):
        made = link(connection, arrived)
        made.info = forge(made.info)
        return made

    forger.engine._media[0].link = forging
    peer = left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    world.run(lambda: left.of(PeerFenced))
    if who == "listener":
        assert "opening" in why(other)
    assert peer == 1
    world.run(lambda: not fabric.queue_pairs)
    assert {type(event) for event in right.events} <= {PeerLost, PeerFenced}


@pytest.mark.parametrize(
    "note",
    [
        *(b"", b"\xc1", [], [[1 << 24, 1]], [[1, -1]], [[1]]),
        [[1, 1], [1, 1]],
        [[4242, 1]],
    ],
)
def test_a_forged_note_ends_the_connection(world, start, fabric, note):
    left, right = start(), start()
    link = right.engine._media[0].link

    def forging(connection, arrived):
        made = link(connection, arrived)
        data = note if isinstance(note, bytes) else msgspec.msgpack.encode(note)
        made._name_ends = lambda: made.connection.send_note(data or b"\0")
        return made

    right.engine._media[0].link = forging
    left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    world.run(lambda: left.of(PeerFenced))
    world.run(lambda: not fabric.queue_pairs)
    assert any(word in why(left) for word in ("note of verbs", "expected 1 queue pairs", "4242"))


def test_a_second_note_ends_the_connection(world, start):
    left, right = start(), start()
    _, back = world.connect(left, right)
    link_of(right, back)._name_ends()
    world.run(lambda: left.of(PeerFenced))
    assert "cannot get ready to receive" in why(left)


def test_a_key_of_a_region_that_is_a_source_alone_is_never_given_away(world, start, fabric):
    node = start(2)
    source = node.register(writable=False)
    there, _ = world.connect(node, start())
    granted = link_of(node, there).info
    _, regions, _ = msgspec.msgpack.decode(granted)
    assert [len(keys) for _, _, keys in regions] == [2, 0]
    assert regions[1] == [0, 0, []]
    assert source.memory.writable is False
    assert sorted(writable for *_, writable in fabric.memory.values())[:2] == [False, False]


# --- Several NICs ---


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 4)])
def test_pages_are_spread_over_all_nics_and_counted_once(world, start, fabric, ours, theirs):
    depths = Depths(send_chain=64)  # so two posts are needed if there are up to 3 queue pairs
    left, right = start(ours, depths=depths), start(theirs, depths=depths)
    there, back = world.connect(left, right)
    lanes = lanes_of(left, there)
    assert len(lanes) == max(ours, theirs)
    assert len({lane.qp.nic.name for lane in lanes}) == ours
    assert len({lane.qp.peer.nic.name for lane in lanes}) == theirs
    left.bytes[:] = noise(MIB)
    right.engine.expect(back, 1, 240)
    left.engine.expect(there, 1, 12)
    fabric.written.clear()
    pages(left, there, right, 240, 4096, 1)
    world.run(lambda: right.reached == [1] and left.ended)
    np.testing.assert_array_equal(right.bytes[: 240 * 4096], left.bytes[: 240 * 4096])
    assert [fabric.written[lane.qp.qpn] for lane in lanes] == [240 // len(lanes)] * len(lanes)
    pages(right, back, left, 12, 64, 1)
    world.run(lambda: left.reached == [1])


def test_single_writes_take_the_queue_pair_with_most_room(world, start, fabric):
    left, right = start(2), start(2)
    there, back = world.connect(left, right)
    fabric.held = True
    right.engine.expect(back, 1, 8)
    for _ in range(8):
        write(left.engine, there, left.region, 0, right.region.descriptor, 0, 8, 1)
        left.poll()
    assert [lane.room for lane in lanes_of(left, there)] == [0, 0]
    fabric.held = False
    fabric.move()
    world.run(lambda: right.reached == [1] and len(left.ended) == 8)


# --- Full queues ---


def test_two_hundred_writes_through_a_queue_of_four(world, start, fabric):
    """Completions come slowly. Each write is posted once, and the wait for room is a wait."""
    left, right = start(), start()
    there, back = world.connect(left, right)
    (lane,) = lanes_of(left, there)
    fabric.held = True
    left.bytes[:] = noise(MIB)
    right.engine.expect(back, 1, 200)
    pages(left, there, right, 200, 4096, 1)
    link = link_of(left, there)
    for _ in range(1000):
        if left.ended:
            break
        for _ in range(4):
            left.poll()
        assert lane.room == 0 or link.jobs == link.jobs.__class__()
        assert not link.can_post()
        fabric.move(1)
        right.poll()
    world.run(lambda: right.reached == [1])
    assert lane.qp.posted_ids == list(range(1, 202))  # with the first write
    assert lane.qp.most_outstanding == 4
    assert max(lane.qp.chains) == 2
    np.testing.assert_array_equal(right.bytes[: 200 * 4096], left.bytes[: 200 * 4096])


def test_a_full_queue_waits_and_does_not_spin(world, start, fabric):
    left, right = start(), start()
    there, _ = world.connect(left, right)
    fabric.held = True
    pages(left, there, right, 8, 64, 1)
    for _ in range(4):
        left.poll()
    start_ns = time.monotonic()
    assert left.engine.poll(0.05) == []
    assert time.monotonic() - start_ns >= 0.05


def test_a_completion_ends_the_wait(world, start, fabric):
    """One that comes between two looks, when the queue has just been asked to tell, too."""
    left, right = start(), start()
    there, back = world.connect(left, right)
    (lane,) = lanes_of(right, back)
    world.rounds()
    fabric.held = True
    right.engine.expect(back, 1, 2)
    pages(left, there, right, 2, 64, 1)
    left.poll()
    rearm = lane.qp.rearm

    def late():
        fabric.move(1)  # after our last look, before it is armed
        rearm()

    lane.qp.rearm = late
    fabric.move(1)
    begin = time.monotonic()
    right.poll(5.0)
    assert right.reached == [1]
    assert time.monotonic() - begin < 4.0


def test_more_completions_than_one_look_takes_do_not_wait(world, start, fabric):
    count = 3 * POLL_COMPLETIONS + 7  # one `poll` looks twice
    left, right = (start(depths=Depths(sends=4096, send_chain=4096)) for _ in range(2))
    there, back = world.connect(left, right)
    right.engine.expect(back, 1, count)
    pages(left, there, right, count, 64, 1)
    left.poll()
    begin = time.monotonic()
    while not right.reached:
        right.poll(5.0)
    assert time.monotonic() - begin < 4.0


def test_a_slow_reader_loses_no_count(world, start, fabric):
    """It has far fewer receives than the writer has writes, and looks now and then."""
    left, right = start(depths=Depths()), start(nbytes=MIB)
    there, back = world.connect(left, right)
    left.bytes[:] = noise(MIB)
    for imm in range(4):
        right.engine.expect(back, imm, 125)
        pages(left, there, right, 125, 256, imm, seed=imm)
    for _ in range(20):
        left.poll()
    assert fabric.written[lanes_of(left, there)[0].qp.qpn] < 20
    world.run(lambda: sorted(right.reached) == [0, 1, 2, 3] and len(left.ended) == 4)
    (lane,) = lanes_of(right, back)
    assert 4 < lane.receives <= 8


def test_an_immediate_travels_in_network_order(world, start, fabric):
    left, right = start(), start()
    there, _ = world.connect(left, right)
    fabric.held = True
    write(left.engine, there, left.region, 0, right.region.descriptor, 0, 8, 0x01020304)
    left.poll()
    (lane,) = lanes_of(left, there)
    request, _ = lane.qp.pending[0]
    assert request.tobytes()[36:40] == bytes([1, 2, 3, 4])


# --- Errors ---


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_is_told_once_with_its_first_cause_and_whose_write(world, start, fabric, count):
    left, right = start(), start()
    there, back = world.connect(left, right)
    fabric.held = True
    right.engine.expect(back, 7, count)
    pages(left, there, right, 1, 512, 6)
    failed = pages(left, there, right, count, 512, 7)
    for _ in range(3):
        left.poll()
    fabric.move(1)
    (key,) = {int(request["rkey"]) for request, _ in lanes_of(left, there)[0].qp.pending}
    nic, base, _, writable = fabric.memory[key]
    fabric.memory[key] = (nic, base, 100, writable)
    fabric.move()
    world.run(lambda: left.of(PeerFenced) and right.of(PeerFenced))
    assert why(left).startswith(
        "a write of 512 bytes with imm 7 failed: remote access error; queue pair"
    )
    assert "the peer's is" in why(left)
    assert "check" not in why(left)
    assert why(right).startswith("a receive failed: WR flush error; queue pair")
    assert failed not in left.ended
    assert right.reached == []


def test_a_receive_that_fails_is_no_write_of_ours(world, start, fabric):
    left, right = start(), start()
    there, _ = world.connect(left, right)
    fabric.held = True
    pages(left, there, right, 2, 64, 1)
    left.poll()
    (lane,) = lanes_of(left, there)
    assert lane.chains
    failed = np.zeros(1, WC)
    failed["wr_id"], failed["status"] = RECEIVE, 5
    assert lane.why(failed[0]).startswith("a receive failed: WR flush error; queue pair")


def test_the_process_lives_and_connects_again(world, start, fabric):
    left, right = start(), start()
    there, _ = world.connect(left, right)
    fabric.cut.add(left.engine._media[0].nics[0].name)
    pages(left, there, right, 3, 64, 1)
    world.run(lambda: left.of(PeerFenced) and right.of(PeerFenced))
    assert "retry exceeded" in why(left)
    fabric.cut.clear()
    again, back = world.connect(left, right)
    right.engine.expect(back, 2, 3)
    pages(left, again, right, 3, 64, 2)
    world.run(lambda: right.reached == [2])


def test_what_arrived_is_counted_before_the_peer_is_lost(world, start, fabric):
    left, right = start(), start()
    there, back = world.connect(left, right)
    right.engine.expect(back, 1, 3)
    pages(left, there, right, 3, 64, 1)
    for _ in range(3):
        left.poll()
    left.engine.close()
    world.nodes.remove(left)
    world.run(lambda: right.of(PeerFenced))
    assert [type(event) for event in right.events[1:]] == [ImmReached, PeerLost, PeerFenced]
    left.close()


def test_a_device_that_is_gone_ends_its_connections_and_fences(world, start, fabric):
    left, right = start(), start()
    world.connect(left, right)
    fabric.gone.add(left.engine._media[0].nics[0].name)
    world.run(lambda: left.of(PeerFenced) and right.of(PeerFenced))
    assert "Input/output error" in why(left)


# --- Fences ---


def test_the_fence_waits_for_every_receive_to_come_back(world, start, fabric):
    left, right = start(2), start(2)
    _, back = world.connect(left, right)
    pairs = [lane.qp for lane in lanes_of(right, back)]
    fabric.holds_flushes = True
    looks = []
    for pair in pairs:
        pair.poll = partial(flushed_late, pair, pairs, pair.poll, looks)
    right.engine.close_peer(back, "silent")
    right.poll()
    # Each was looked at until it had flushed, and not destroyed before.
    assert looks == [pair for pair in pairs for _ in range(4)]
    assert [type(event) for event in right.events[1:]] == [PeerLost, PeerFenced]
    assert [pair.state for pair in pairs] == ["closed", "closed"]


def flushed_late(pair, pairs, poll, looks):
    """A `poll` whose fourth call in the error state is when the NIC has come so far."""
    if pair.state == "ERROR":
        assert all(each.state in ("ERROR", "closed") for each in pairs), "all are stopped first"
        looks.append(pair)
        if looks.count(pair) == 4:
            pair.flush()
    return poll()


def test_no_source_is_read_any_more_when_a_peer_is_lost(world, start, fabric):
    """Its own writes have come back then; if they do not, the queue pair is destroyed."""
    left, right = start(), start()
    there, _ = world.connect(left, right)
    fabric.held = True
    pages(left, there, right, 4, 64, 1)
    left.poll()
    left.poll()
    (lane,) = lanes_of(left, there)
    fabric.holds_flushes = True
    assert lane.qp.pending
    left.engine.close_peer(there, "enough")
    while not left.of(PeerLost):
        left.poll()
    assert lane.qp.state == "closed"


def test_receives_that_never_come_back_end_with_the_queue_pair(world, start, fabric, monkeypatch):
    monkeypatch.setattr(verbs, "FLUSH_SECONDS", 0.05)
    left, right = start(), start()
    _, back = world.connect(left, right)
    (lane,) = lanes_of(right, back)
    fabric.holds_flushes = True
    right.engine.close_peer(back, "silent")
    world.run(lambda: right.of(PeerFenced), seconds=1)
    assert lane.qp.state == "closed"


# --- Nothing is left ---


def test_memory_is_registered_on_all_nics_or_on_none(start, fabric):
    node = start(3)
    before = Counter(fabric.open)
    first, _, last = node.engine._media[0].nics
    register = last.register

    def refuse(memory):
        raise TransferError(f"{last.name} cannot register {memory.nbytes} bytes")

    last.register = refuse
    with pytest.raises(TransferError, match=f"{last.name} cannot register {MIB} bytes"):
        node.register()
    assert fabric.open == before
    last.register = register
    node.register()
    assert fabric.open["registration"] == before["registration"] + 3
    assert first.is_open


def test_opening_and_closing_leaves_nothing(fabric):
    def once(how):
        world = World(lambda: TransferEngine([VerbsMedium([fabric.nic()], SMALL)]))
        try:
            left, right = world.node(64 * KIB), world.node(64 * KIB)
            there, _ = world.connect(left, right)
            fabric.held = how == "error"
            pages(left, there, right, 16, 64, 1)
            left.poll()
            if how == "error":
                raise RuntimeError("in the middle of a transfer")
        except RuntimeError:
            pass
        if how == "scope":
            for node in world.nodes:
                node.memory.close()
            del world, left, right, node
            gc.collect()
        else:
            world.close()
            world.close()
        fabric.held = False

    once("close")
    before = open_descriptors()
    for turn in range(50):
        once({10: "error", 20: "scope"}.get(turn, "close"))
        assert not any(fabric.open.values()), (turn, fabric.open)
        assert not fabric.memory
    assert open_descriptors() == before


def test_nothing_is_left_of_links_that_were_not_chosen_or_not_built(world, start, fabric):
    """A stranger calls, and one who does not answer."""
    left, right = start(opening_timeout=0.1), start(opening_timeout=0.1)
    right.engine._media[0].link = partial(silent, right.engine._media[0].link)
    left.engine.connect(*right.engine.listen("127.0.0.1", 0))
    world.run(lambda: left.of(PeerFenced))
    world.run(lambda: not fabric.queue_pairs)
    assert "the path for writes did not come up within 0.1 s; check MTU and firewalls" in why(left)


def silent(link, connection, arrived):
    made = link(connection, arrived)
    made.take_note = lambda data: None
    return made


def test_memory_of_a_device_counts_from_the_start_of_its_dma_buf(world, start, fabric):
    """Offsets travel the same, whatever the addresses are."""
    left, right = start(), start()
    buffer = np.zeros(4096, np.uint8)
    address = buffer.ctypes.data
    # The fake takes `fd_offset` for an address.
    region = right.engine.register(
        Memory(address=address, nbytes=4096, fd=-1, fd_offset=address, device="cuda:0")
    )
    there, back = world.connect(left, right)
    left.bytes[:] = 3
    right.engine.expect(back, 1, 1)
    write(left.engine, there, left.region, 0, region.descriptor, 100, 50, 1)
    world.run(lambda: right.reached == [1])
    assert buffer.sum() == 150
    assert buffer[100:150].all()
