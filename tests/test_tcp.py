"""What only tcp has: its frames, its data connections, and peers that lie on either."""

import contextlib
import socket
import struct
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.transfer.control import MAX_OPENING_CONNECTIONS
from disagg.transfer.interface import (
    ImmReached,
    Memory,
    MessageReceived,
    PeerFenced,
    PeerLost,
    WritesDone,
)
from disagg.transfer.tcp import CALL_BYTES, FRAME_BYTES, MAX_FRAME_WRITES
from disagg.transfer.wire import JOIN, framed, opening
from tests.engines import (
    Opened,
    OpeningControl,
    link_of,
    open_jobs,
    tcp_engine,
    write,
    write_pages,
)
from tests.test_transfer_conformance import (
    DEADLINE_SECONDS,
    KIB,
    MIB,
    World,
    noise,
    shuffled,
    was_closed,
)


@pytest.fixture
def world():
    with contextlib.closing(World(tcp_engine)) as world:
        yield world


def make_buffers_small(node, peer):
    """The kernel's, so that a frame does not fit. (Below two segments, TCP waits on timers.)"""
    data = link_of(node, peer)._data.socket
    for option, nbytes in ((socket.SO_SNDBUF, 32 * KIB), (socket.SO_RCVBUF, 128 * KIB)):
        data.setsockopt(socket.SOL_SOCKET, option, nbytes)


def choppy_tcp(most):
    """Its kernel takes a few bytes at a time."""
    rng = np.random.default_rng(3)
    return tcp_engine(
        lambda data, buffers: socket.socket.sendmsg(
            data, [b"".join(buffers)[: rng.integers(1, most)]]
        )
    )


def write_all(writer, there, owner, page, imm=1):
    """One ticket with every page of the region, in random places."""
    count = writer.bytes.size // page
    return write_pages(
        writer.engine,
        there,
        writer.region,
        owner.region.descriptor,
        page,
        shuffled(count, page, seed=1),
        shuffled(count, page, seed=2),
        imm,
    )


# --- Moving ---


@pytest.mark.parametrize(
    ("nbytes", "page", "most"),
    [
        (10 * KIB, 24, 64),
        (100 * KIB, 1000, 5000),
        (4 * MIB, 300 * KIB, MIB),
        (9 * MIB, FRAME_BYTES + 9, FRAME_BYTES),
    ],
)
def test_frames_cut_anywhere_arrive_whole(nbytes, page, most):
    """In the header, in the offsets, inside and between pages."""
    with contextlib.closing(World(lambda: choppy_tcp(most))) as world:
        cut_frames(world, nbytes, page)


def cut_frames(world, nbytes, page):
    writer, owner = world.node(nbytes), world.node(nbytes)
    there, back = world.connect(writer, owner)
    writer.bytes[:] = noise(nbytes)
    count = nbytes // page
    owner.engine.expect(back, 1, count)
    write_all(writer, there, owner, page)
    world.run(lambda: owner.reached == [1])
    whole = count * page
    ours, theirs = (node.bytes[:whole].reshape(count, page) for node in (writer, owner))
    order = [shuffled(count, page, seed=seed) // page for seed in (1, 2)]
    np.testing.assert_array_equal(theirs[order[1]], ours[order[0]])
    assert not owner.bytes[whole:].any()


def test_memory_needs_no_descriptor(world):
    writer, owner = world.node(4096), world.node(4096)
    plain = np.full(64, 9, dtype=np.uint8)
    region = writer.engine.register(Memory(address=plain.ctypes.data, nbytes=64))
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 1)
    write(writer.engine, there, region, 0, owner.region.descriptor, 5, 64, 1)
    world.run(lambda: owner.reached == [1])
    assert owner.bytes.sum() == 9 * 64


def test_one_poll_sends_a_bounded_amount_and_peers_take_turns():
    sent = []

    def send(data, buffers):  # a kernel that takes everything at once and loses it
        sent.append((data, sum(buffer.nbytes for buffer in buffers)))
        return sent[-1][1]

    with contextlib.closing(World(lambda: tcp_engine(send))) as world:
        writer = world.node(3 * FRAME_BYTES)
        owners = [world.node(3 * FRAME_BYTES) for _ in range(2)]
        peers = [world.connect(writer, owner)[0] for owner in owners]
        world.rounds(5)
        for owner, there in zip(owners, peers, strict=True):
            write_all(writer, there, owner, 64 * KIB)
        turns = []
        while len(writer.ended) < 2:
            sent.clear()
            writer.poll(5.0)  # has something to do, so it does not wait
            turns.append({data for data, _ in sent})
            assert sum(nbytes for _, nbytes in sent) < FRAME_BYTES + 16 * KIB
        assert turns == [{link_of(writer, there)._data.socket} for there in peers] * 3


def test_one_poll_makes_a_bounded_number_of_small_frames(world):
    writer, owner = world.node(), world.node()
    there, _ = world.connect(writer, owner)
    world.rounds(5)
    for _ in range(1000):
        write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 1, 1)
    writer.poll()
    assert 0 < len(writer.ended) <= FRAME_BYTES // CALL_BYTES


def test_a_peer_that_does_not_read_stops_its_own_writes_only(world):
    """What is outstanding is bounded, waiting costs nothing, messages and other peers go on."""
    writer, sleeper, owner = world.node(16 * MIB), world.node(16 * MIB), world.node(16 * MIB)
    there, back = world.connect(writer, sleeper)
    other, other_back = world.connect(writer, owner)
    make_buffers_small(writer, there)
    make_buffers_small(sleeper, back)
    world.nodes.remove(sleeper)
    writer.bytes[:] = 1
    ticket = write_all(writer, there, sleeper, 64 * KIB)
    job = open_jobs(writer.engine)[ticket]
    owner.engine.expect(other_back, 2, 256)
    write_all(writer, other, owner, 64 * KIB, imm=2)
    writer.engine.send(other, b"still there")
    world.run(lambda: owner.reached == [2] and len(owner.of(MessageReceived)) == 2)

    def waits():
        start = time.monotonic()
        writer.poll(0.05)
        return time.monotonic() - start >= 0.045

    world.run(waits)  # not at once: the kernel goes on for a moment
    assert job.num_posted <= 2 * FRAME_BYTES // (64 * KIB)
    posted = writer.engine.withdraw([ticket])
    assert posted == job.num_posted > 0
    sleeper.engine.expect(back, 1, posted)
    world.nodes.append(sleeper)
    world.run(lambda: sleeper.reached == [1] and ticket in writer.ended)
    world.rounds()
    assert sleeper.bytes.sum() == posted * 64 * KIB
    sleeper.close()
    world.nodes.remove(sleeper)


def test_a_withdrawn_ticket_ends_when_its_last_frame_is_sent(world):
    writer, owner = world.node(2 * FRAME_BYTES), world.node(2 * FRAME_BYTES)
    there, back = world.connect(writer, owner)
    make_buffers_small(writer, there)
    make_buffers_small(owner, back)
    world.rounds(5)
    first, second = (write_all(writer, there, owner, 64 * KIB, imm) for imm in (1, 2))
    while not open_jobs(writer.engine)[first].num_posted:
        writer.poll()
    assert writer.engine.withdraw([first, second]) == FRAME_BYTES // (64 * KIB)
    # The frame of the first is half sent, and reads its source. Of the second there is none.
    assert writer.poll() == [WritesDone(ticket=second)]
    owner.engine.expect(back, 1, FRAME_BYTES // (64 * KIB))
    world.run(lambda: sorted(writer.ended) == [first, second] and owner.reached == [1])


def test_messages_do_not_wait_behind_writes(world, impostor):
    """The peer reads messages, but no page."""
    node = world.node(16 * MIB)
    impostor.dial(node, regions=[16 * MIB])
    node.engine.send(peer_of(node), b"hello")
    impostor.run(node, lambda: impostor.messages == [b"hello"])
    pages = np.arange(256) * 64 * KIB
    write_pages(node.engine, peer_of(node), node.region, 0, 64 * KIB, pages, pages, 1)
    world.run(lambda: link_of(node, peer_of(node))._blocked)
    node.engine.send(peer_of(node), b"alive")
    impostor.run(node, lambda: impostor.messages[1:] == [b"alive"])
    assert node.ended == []


# --- The end ---


def test_nothing_lands_once_fenced_in_the_middle_of_a_frame(world):
    writer, owner = world.node(4 * MIB), world.node(4 * MIB)
    there, back = world.connect(writer, owner)
    make_buffers_small(writer, there)
    make_buffers_small(owner, back)
    writer.bytes[:] = 1
    write_all(writer, there, owner, 64 * KIB)
    world.run(lambda: owner.bytes.any())
    assert not owner.bytes.all()
    owner.engine.close_peer(back, "enough")
    assert owner.poll()[-2:] == [PeerLost(peer=back, why="enough"), PeerFenced(peer=back)]
    owner.bytes[:] = 0xEE
    world.run(lambda: writer.of(PeerFenced))
    world.rounds()
    assert (owner.bytes == 0xEE).all()


@pytest.mark.parametrize("seen_late", ["control", "data"])
def test_what_came_before_the_end_is_reported_before_it(world, seen_late):
    """Whichever of the two connections shows the end first."""
    writer, owner = world.node(), world.node()
    there, back = world.connect(writer, owner)
    owner.engine.expect(back, 1, 16)
    write_all(writer, there, owner, 64 * KIB)
    writer.engine.send(there, b"last words")
    world.nodes.remove(owner)
    world.run(lambda: writer.ended)
    writer.engine.close()
    control = owner.engine
    sockets = {
        "control": control.connections[back].socket,
        "data": link_of(owner, back)._data.socket,
    }
    control.waiter.unwatch(sockets[seen_late].fileno())
    while not owner.of(PeerLost):
        owner.poll(5.0)
    kinds = [type(event) for event in owner.events[1:]]
    assert set(kinds[:-2]) == {MessageReceived, ImmReached}
    assert kinds[-2:] == [PeerLost, PeerFenced]


def test_withdrawing_from_a_lost_peer_is_of_unknown_outcome(world):
    writer, owner = world.node(), world.node()
    there, _ = world.connect(writer, owner)
    ticket = write(writer.engine, there, writer.region, 0, owner.region.descriptor, 0, 8, 1)
    writer.engine.close_peer(there, "gone")
    assert writer.engine.withdraw([ticket]) is None
    world.run(lambda: writer.of(PeerFenced))
    assert WritesDone(ticket=ticket) not in writer.events


# --- Peers that lie, over a control connection of the right transport ---


class Impostor:
    """Opens like tcp, then says on the data connection whatever a test wants."""

    def __init__(self):
        self.offer = lambda: msgspec.msgpack.encode([b"", [4096]])
        self.control = OpeningControl(lambda: {"tcp": self.offer()}, transports=["tcp"])
        self.data = socket.socket()
        self.their_key, self.messages, self.lost = b"", [], []

    def run(self, node, until):
        end = time.monotonic() + DEADLINE_SECONDS
        while not until():
            assert time.monotonic() < end, f"{node.events} {self.messages} {self.lost}"
            node.poll(0.001)
            for event in self.control.poll(0.001):
                match event:
                    case Opened(offers=offers):
                        self.their_key, _ = msgspec.msgpack.decode(offers["tcp"])
                        self.control.ready(event.peer)
                    case MessageReceived(data=data):
                        self.messages.append(data)
                    case PeerLost(why=why):
                        self.lost.append(why)

    def dial(self, victim, key=None, regions=(4096,)):
        """Both connections, and the key, unless another is wanted."""
        self.offer = lambda: msgspec.msgpack.encode([b"", list(regions)])
        address = victim.engine.listen("127.0.0.1", 0)
        self.control.connect(*address)
        self.run(victim, lambda: self.their_key)
        self.data.connect(address)
        self.data.sendall(joining(self.their_key) if key is None else key)

    def close(self):
        self.control.close()
        self.data.close()


def joining(key):
    """How a data connection begins."""
    return opening({JOIN: key})


@pytest.fixture
def impostor():
    with contextlib.closing(Impostor()) as made:
        yield made


def peer_of(node):
    (peer,) = node.engine._links
    return peer


def frame(offsets, payload=b"", *, region=0, imm=1, write_bytes=8):
    return head(region, imm, write_bytes, struct.pack(f"<{len(offsets)}Q", *offsets)) + payload


def head(*fields):
    return framed(msgspec.msgpack.encode(fields))


#: Bytes of `frame` with two small offsets, before the payload.
HEAD_BYTES = len(frame([0, 8]))


def fate(world, impostor, node):
    """Why the node lost the impostor."""
    impostor.run(node, lambda: node.of(PeerFenced))
    lost, fenced = node.events
    assert fenced == PeerFenced(peer=lost.peer)
    assert not node.engine._links
    return lost.why


def test_an_honest_impostor_is_a_peer(world, impostor):
    """So that the refusals below are for their own reasons."""
    node = world.node(4096)
    impostor.dial(node)
    impostor.data.sendall(frame([8, 4088], b"x" * 16))
    node.engine.expect(peer_of(node), 1, 2)
    world.run(lambda: node.reached == [1])
    assert node.bytes.sum() == 16 * ord("x")
    assert node.bytes[8:16].all()
    assert node.bytes[4088:].all()


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (frame([0], region=1), "a frame for region 1 of 1"),
        (frame([0], region=2**32 - 1), "a frame for region 4294967295 of 1"),
        (frame([0], region=-1), "malformed head of a frame"),
        (frame([0, 4089]), "destination offset 4089: 8 bytes there leave the region of 4096"),
        (frame([0, 2**64 - 1]), "destination offset -1:"),
        (frame([2**63]), "leave the region"),
        (frame([0], write_bytes=4097), "destination offset 0: 4097 bytes there leave the region"),
        (frame([0], write_bytes=2**64 - 1), "leave the region"),
        (frame([0, 0], write_bytes=FRAME_BYTES), "leave the region"),
        (frame([0], write_bytes=0), "malformed head of a frame"),
        (frame([0], imm=2**32), "malformed head of a frame"),
        (frame([]), "malformed head of a frame"),
        (frame([0] * (MAX_FRAME_WRITES + 1)), "malformed head of a frame"),
        (frame([0] * (2 * MAX_FRAME_WRITES)), "sent a frame of 41"),
        (head(0, 1, 8, bytes(12)), "buffer size must be a multiple of element size"),
        (head(0, 1, 8), "malformed head of a frame"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "sent a frame of "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frame_that_is_wrong_ends_the_connection_and_writes_nothing(world, impostor, lie, why):
    node = world.node(4096)
    impostor.dial(node)
    impostor.data.sendall(lie + frame([0], b"y" * 8) + b"y" * 64)
    assert why in fate(world, impostor, node)
    assert not node.bytes.any()


@pytest.mark.parametrize("write_bytes", [1, 8, 4096])
def test_a_frame_for_a_region_that_is_a_source_alone_writes_nothing(world, impostor, write_bytes):
    node = world.node(4096)
    node.register(writable=False)
    impostor.dial(node)
    impostor.data.sendall(frame([0], b"y" * write_bytes, region=1, write_bytes=write_bytes))
    assert "leave the region of 0 bytes" in fate(world, impostor, node)
    assert not node.bytes.any()


@pytest.mark.parametrize("cut", [0, 1, 4, 10, HEAD_BYTES, HEAD_BYTES + 5])
def test_the_end_of_the_stream_inside_a_frame(world, impostor, cut):
    node = world.node(4096)
    impostor.dial(node)
    impostor.data.sendall(frame([0, 8], b"x" * 16)[:cut])
    impostor.data.close()
    assert fate(world, impostor, node).endswith("closed the connection")


@settings(max_examples=30, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=100),
        st.builds(
            lambda fields, rest: head(*fields) + rest,
            st.tuples(
                *(st.sampled_from([-1, 0, 1, 2, 255, 2**31, 2**32 - 1]) for _ in range(2)),
                st.sampled_from([0, 1, 8, 4096, 2**20, 2**63, 2**64 - 1]),
                st.one_of(st.binary(max_size=40), st.just(bytes(16))),
            ),
            st.binary(max_size=100),
        ),
    )
)
def test_no_bytes_make_poll_raise_or_land_outside(data):
    with contextlib.closing(World(tcp_engine)) as world:
        with contextlib.closing(Impostor()) as impostor:
            node = world.node(4096)
            impostor.dial(node)
            world.rounds(3)
            with contextlib.suppress(ConnectionError):
                impostor.data.sendall(data)
                world.rounds(3)
                impostor.data.sendall(data)
            world.rounds(3)


@settings(max_examples=30, deadline=None)
@given(info=st.one_of(st.binary(max_size=40), st.just(msgspec.msgpack.encode([b"x", [-1]]))))
def test_no_opening_makes_poll_raise(info):
    """Whoever of the two dials."""
    with contextlib.closing(World(tcp_engine)) as world:
        with contextlib.closing(Impostor()) as impostor:
            impostor.offer = lambda: info
            node = world.node(4096)
            impostor.control.connect(*node.engine.listen("127.0.0.1", 0))
            node.engine.connect(*impostor.control.listen("127.0.0.1", 0))
            for _ in range(4):
                node.poll(0.0005)
                impostor.control.poll(0)


@pytest.mark.parametrize("key", [joining(b"0" * 32), joining(b""), b"\x10\0\0\0short", b""])
def test_a_data_connection_without_the_key_is_closed_in_time(world, impostor, key):
    """A wrong one at once, the others at the deadline, which also ends the control connection."""
    node = world.node(opening_timeout=0.3)
    impostor.dial(node, key=key)
    world.run(lambda: was_closed(impostor.data))
    assert len(node.engine._links) == (len(key) > 10)
    impostor.run(node, lambda: impostor.lost)
    assert not node.engine._links
    assert {type(event) for event in node.events} == {PeerLost, PeerFenced}


def test_a_key_opens_once(world, impostor):
    node = world.node(4096)
    impostor.dial(node)
    world.rounds(5)
    with socket.create_connection(impostor.data.getpeername()) as second:
        second.sendall(joining(impostor.their_key))
        world.run(lambda: was_closed(second))
    node.engine.expect(peer_of(node), 1, 1)
    impostor.data.sendall(frame([0], b"x" * 8))
    world.run(lambda: node.reached == [1])


def test_silent_data_connections_disturb_nobody_and_are_bounded(world):
    node, honest = world.node(opening_timeout=30.0), world.node()
    node.address = node.engine.listen("127.0.0.1", 0)
    there, back = world.connect(honest, node)
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(MAX_OPENING_CONNECTIONS + 5):
            silent.append(stack.enter_context(socket.create_connection(node.address)))
            node.poll(0.01)
        world.run(lambda: all(was_closed(each) for each in silent[-5:]))
        node.engine.expect(back, 1, 1)
        write(honest.engine, there, honest.region, 0, node.region.descriptor, 0, 8, 1)
        world.run(lambda: node.reached == [1])
        assert not any(was_closed(each) for each in silent[:10])


def test_a_key_may_come_in_pieces_and_with_a_frame(world):
    node = world.node(4096)
    address = node.engine.listen("127.0.0.1", 0)
    with socket.create_connection(address) as control, socket.socket() as data:
        ours = opening({"tcp": msgspec.msgpack.encode([b"", [8]])})
        control.sendall(ours + framed(b"hello"))
        world.rounds(3)
        control.settimeout(DEADLINE_SECONDS)
        (length,) = struct.unpack("<I", control.recv(4, socket.MSG_WAITALL))
        theirs = msgspec.msgpack.decode(control.recv(length, socket.MSG_WAITALL)[12:])
        key, _ = msgspec.msgpack.decode(theirs["tcp"])
        data.connect(address)
        door, first = joining(key), frame([0], b"x" * 8)
        for piece in (door[:2], door[2:9], door[9:] + first[:15]):
            data.sendall(piece)
            world.rounds(5)
        peer = peer_of(node)
        node.engine.expect(peer, 1, 1)
        world.run(lambda: node.of(MessageReceived))
        data.sendall(first[15:])
        world.run(lambda: node.reached == [1])


def test_who_is_called_must_give_a_key(world, impostor):
    node = world.node()
    peer = node.engine.connect(*impostor.control.listen("127.0.0.1", 0))
    impostor.run(node, lambda: node.of(PeerFenced))
    (lost,) = node.of(PeerLost)
    assert lost.peer == peer
    assert "closed the connection" in lost.why  # the second one, which joins nothing


def test_a_door_that_was_shut_meanwhile(world, impostor):
    """The second connection to the same port is refused."""
    node = world.node()
    impostor.offer = lambda: msgspec.msgpack.encode([b"key", []])
    host, port = impostor.control.listen("127.0.0.1", 0)
    node.engine.connect(host, port)
    while not impostor.control.connections:
        impostor.control.poll(0.01)
    impostor.control.waiter.close_socket(impostor.control._listener)
    impostor.run(node, lambda: node.of(PeerFenced))
    (lost,) = node.of(PeerLost)
    assert lost.why.startswith(f"cannot connect to {host}:{port}: Connection refused; check")


def test_a_note_is_nothing_that_tcp_knows(world, impostor):
    node = world.node()
    impostor.dial(node)
    world.rounds(5)
    (connection,) = impostor.control.connections.values()
    connection.send_note(b"note")
    assert "a note of 4 bytes" in fate(world, impostor, node)


def test_a_peer_that_is_closed_while_its_data_connection_is_dialled(world, impostor):
    """The second connection ends with the first."""
    node = world.node()
    impostor.offer = lambda: msgspec.msgpack.encode([b"k" * 32, []])
    peer = node.engine.connect(*impostor.control.listen("127.0.0.1", 0))
    impostor.run(node, lambda: link_of(node, peer)._data)
    dialled = link_of(node, peer)._data.socket
    node.engine.close_peer(peer, "enough")
    node.poll()
    assert dialled.fileno() == -1
    assert [event.why for event in node.of(PeerLost)] == ["enough"]
