"""Two controls over real sockets, and one control against peers that speak nonsense."""

import contextlib
import socket
import struct
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.transfer import control as control_module
from disagg.transfer import wire
from disagg.transfer.control import MAX_MESSAGE_BYTES
from disagg.transfer.interface import MessageReceived, PeerLost, TransferError
from disagg.transfer.wire import MAX_OPENING_BYTES, READ_BYTES, decode_opening
from tests.engines import Opened, OpeningControl

DEADLINE_SECONDS = 10.0


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_control(transport="test", clock=time.monotonic, opening_timeout=5.0):
    return OpeningControl(
        lambda: {transport: b"info"},
        transports=[transport, "spare"],
        clock=clock,
        timeout=opening_timeout,
    )


@pytest.fixture
def ours():
    with contextlib.closing(make_control()) as control:
        yield control


@pytest.fixture
def theirs():
    with contextlib.closing(make_control()) as control:
        yield control


def run(*controls, until, make_ready=True):
    """Poll all until `until(*events of each)`; returns the events of each."""
    events = [[] for _ in controls]
    end = time.monotonic() + DEADLINE_SECONDS
    while not until(*events):
        assert time.monotonic() < end, f"not within {DEADLINE_SECONDS} s; got {events}"
        for control, seen in zip(controls, events, strict=True):
            for event in control.poll(0.001):
                seen.append(event)
                if make_ready and isinstance(event, Opened):
                    control.ready(event.peer)
    return events


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def frame(data):
    return struct.pack("<I", len(data)) + data


def opening(transport="test", info=b"x"):
    return wire.opening({transport: info, "unknown": b""})


@contextlib.contextmanager
def raw_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_SECONDS)
        yield server


def test_openings_carry_info(ours, theirs):
    host, port = theirs.listen("127.0.0.1", 0)
    assert ours.connect(host, port) == 1
    mine, other = run(ours, theirs, until=lambda a, b: a and b)
    assert mine == other == [Opened(peer=1, offers={"test": b"info"})]
    tcp = ours.connections[1].socket
    assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_messages_keep_their_order_and_wait_for_ready_on_both_sides(ours, theirs):
    peer = ours.connect(*theirs.listen("127.0.0.1", 0))
    sent = [b"%d" % i for i in range(100)]
    for data in sent[:50]:
        ours.send(peer, data)
    run(ours, theirs, until=lambda a, b: a and b, make_ready=False)
    ours.ready(peer)
    for data in sent[50:]:
        ours.send(peer, data)
    for _ in range(5):
        assert ours.poll(0.001) == theirs.poll(0.001) == []  # theirs is not ready
    theirs.ready(1)
    _, other = run(ours, theirs, until=lambda a, b: len(b) == 100)
    assert [event.data for event in other] == sent


def test_a_message_of_the_largest_size_arrives_in_bounded_steps(ours, theirs):
    peer = ours.connect(*theirs.listen("127.0.0.1", 0))
    data = bytes(range(256)) * (MAX_MESSAGE_BYTES // 256)
    ours.send(peer, data)
    _, other = run(ours, theirs, until=lambda a, b: of(MessageReceived, b))
    assert other[-1].data == data


@pytest.mark.parametrize("nbytes", [0, MAX_MESSAGE_BYTES + 1])
def test_a_message_that_no_frame_can_carry_is_refused(ours, nbytes):
    with pytest.raises(ValueError, match="1 to 16777216 bytes"):
        ours.send(1, bytes(nbytes))


def test_messages_said_last_arrive_before_the_loss(ours, theirs):
    peer = ours.connect(*theirs.listen("127.0.0.1", 0))
    run(ours, theirs, until=lambda a, b: a and b)
    ours.send(peer, b"goodbye")
    ours.close_peer(peer, "done")
    assert ours.poll(0) == [PeerLost(peer=1, why="done")]
    assert ours.poll(0) == []
    ours.close_peer(peer, "again")
    ours.send(peer, b"to nobody")
    _, other = run(ours, theirs, until=lambda a, b: of(PeerLost, b))
    assert isinstance(other[0], MessageReceived)
    assert "closed the connection" in other[1].why
    assert peer not in ours.connections


@pytest.mark.parametrize(
    ("error", "why"), [(TransferError("gone"), "gone"), (OSError(5, "gone"), "{} broke: gone")]
)
def test_a_link_that_fails_takes_the_last_words(ours, theirs, error, why):
    peer = ours.connect(*theirs.listen("127.0.0.1", 0))
    run(ours, theirs, until=lambda a, b: a and b)
    ours.send(peer, b"last")

    def fail():
        raise error

    connection = theirs.connections[1]
    why = why.format(f"connection to {connection.address}")
    connection.guard(fail)
    assert theirs.poll(0) == [
        MessageReceived(peer=1, data=b"last"),
        PeerLost(peer=1, why=why),
    ]
    connection.guard(fail)
    assert theirs.poll(0) == []


def test_peer_numbers_are_never_used_again(ours, theirs):
    address = theirs.listen("127.0.0.1", 0)
    first = ours.connect(*address)
    ours.close_peer(first, "done")
    assert [ours.connect(*address), ours.connect(*address)] == [2, 3]


def test_a_taken_port_is_named_with_the_way_out(ours, theirs):
    host, port = theirs.listen("127.0.0.1", 0)
    with pytest.raises(TransferError, match=f"{host}:{port}.*--listen, or port 0"):
        ours.listen(host, port)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_what_can_be_no_host_name_is_told_as_such(ours, host):
    peer = ours.connect(host, 1)
    (lost,) = ours.poll(0)
    assert lost.peer == peer
    assert f"cannot connect to {host}:1: encoding with 'idna' codec failed" in lost.why
    with pytest.raises(TransferError, match=f"cannot listen on {host}:0: .*label.* too long"):
        ours.listen(host, 0)


def test_a_refused_connection_names_the_address(ours):
    with socket.socket() as unused:  # bound, so that nobody else gets it, but not listening
        unused.bind(("127.0.0.1", 0))
        host, port = unused.getsockname()
        ours.connect(host, port)
        (lost,) = run(ours, until=len)[0]
    assert lost.why.startswith(f"cannot connect to {host}:{port}: Connection refused; check host")


def test_an_unknown_host_is_a_loss_not_an_exception(ours):
    peer = ours.connect("no such host", 1)
    start = time.monotonic()
    (lost,) = ours.poll(30.0)  # knows already, so it does not wait
    assert time.monotonic() - start < 15.0
    assert lost.peer == peer
    assert "cannot connect to no such host:1" in lost.why


def test_a_socket_that_met_itself_is_not_a_peer(ours, monkeypatch):
    """Linux lets a dialled port of the local range be the dialler's own."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    make = socket.socket

    def bound_to_it(*args):
        made = make(*args)
        made.bind(("127.0.0.1", port))
        return made

    monkeypatch.setattr(control_module.socket, "socket", bound_to_it)
    ours.connect("127.0.0.1", port)
    (lost,) = run(ours, until=len)[0]
    assert "Connection refused" in lost.why


def test_a_silent_peer_ends_at_the_opening_deadline():
    clock = Clock()
    with raw_server() as server, contextlib.closing(make_control(clock=clock)) as ours:
        ours.connect(*server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            for _ in range(5):
                assert ours.poll(0.001) == []
            clock.now += 4.999
            assert ours.poll(0) == []
            clock.now += 0.001
            (lost,) = ours.poll(0)
    assert "sent no opening within 5 s" in lost.why


def test_a_wait_ends_at_the_opening_deadline():
    with raw_server() as server, contextlib.closing(make_control(opening_timeout=0.05)) as ours:
        start = time.monotonic()
        ours.connect(*server.getsockname())
        lost = []
        while not lost:
            lost = ours.poll(30.0)
        assert 0.05 <= time.monotonic() - start < 15.0


def test_an_unanswered_dial_ends_at_the_deadline():
    """A full backlog drops the SYN, so the connection is never even made."""
    clock = Clock()
    with socket.socket() as server, contextlib.ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        with contextlib.closing(make_control(clock=clock)) as ours:
            ours.connect(*server.getsockname())
            assert ours.poll(0.01) == []
            clock.now += 5
            (lost,) = ours.poll(0)
    assert "did not answer within 5 s" in lost.why


def test_a_transport_that_never_gets_ready_ends_at_the_deadline():
    clock = Clock()
    with contextlib.closing(make_control(clock=clock)) as ours:
        with contextlib.closing(make_control()) as theirs:
            ours.connect(*theirs.listen("127.0.0.1", 0))
            run(ours, theirs, until=lambda a, b: a and b, make_ready=False)
            clock.now += 5
            (lost,) = ours.poll(0)
    assert "the path for writes did not come up within 5 s" in lost.why


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a frame of 1347703880 bytes; expected 1 to 65536"),
        (struct.pack("<I", 0), "a frame of 0 bytes"),
        (struct.pack("<I", 65537), "a frame of 65537 bytes"),
        (frame(b"short"), "no opening of a disagg node"),
        (frame(b"x" * 100), "no opening of a disagg node"),
        (frame(b"disagg\x00\x01" + struct.pack("<I", 3)), "control version 3, ours is 2"),
        (frame(b"disagg\x00\x01" + struct.pack("<I", 2) + b"\xc1"), "a malformed opening"),
        (opening(transport="other"), "transport other, unknown, ours is test, spare"),
        (opening() + struct.pack("<I", 0), "a frame of 0 bytes"),
        (opening() + struct.pack("<I", MAX_MESSAGE_BYTES + 1), "a frame of 16777217 bytes"),
    ],
)
def test_nonsense_ends_the_connection_with_a_reason(ours, data, why):
    with raw_server() as server:
        ours.connect(*server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(data)
            (events,) = run(ours, until=lambda a: of(PeerLost, a))
    assert why in events[-1].why
    assert "127.0.0.1:" in events[-1].why


@pytest.mark.parametrize("data", [b"", b"\x10", opening()[:-1], frame(b"junk"), opening()])
def test_a_stranger_that_leaves_is_a_loss_too(ours, data):
    address = ours.listen("127.0.0.1", 0)
    with socket.create_connection(address) as stranger:
        stranger.sendall(data)
    (events,) = run(ours, until=lambda a: of(PeerLost, a))
    assert of(PeerLost, events)[0].peer == 1


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(min_size=1, max_size=200), opened=st.booleans())
def test_no_bytes_make_poll_raise(ours, data, opened):
    if ours._listener is None:
        ours.listen("127.0.0.1", 0)
    with socket.create_connection(ours._listener.getsockname()) as stranger:
        stranger.sendall(opening() * opened + data)
    run(ours, until=lambda a: of(PeerLost, a))
    assert not ours.connections


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=60))
def test_no_opening_makes_poll_raise(body):
    with contextlib.suppress(ValueError):
        decode_opening(wire.opening({"t": b""})[4:16] + body, ["t"])


def test_a_reset_is_a_loss(ours):
    with raw_server() as server:
        peer = ours.connect(*server.getsockname())
        accepted, _ = server.accept()
        accepted.sendall(opening())
        run(ours, until=lambda a: of(Opened, a))
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        ours.send(peer, b"into the void")
        ours.send(peer, b"and again")
        (events,) = run(ours, until=lambda a: of(PeerLost, a))
    assert len(of(PeerLost, events)) == 1


def test_last_words_are_heard_although_our_answer_cannot_be_sent(ours):
    with raw_server() as server:
        peer = ours.connect(*server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(opening())
            run(ours, until=lambda a: of(Opened, a))
            assert accepted.recv(1000)
            accepted.sendall(frame(b"goodbye"))
        for _ in range(3):  # answered with a reset, then refused
            ours.send(peer, b"hello?")
        (events,) = run(ours, until=lambda a: of(PeerLost, a))
    assert events[0] == MessageReceived(peer=peer, data=b"goodbye")


def test_a_stranger_cannot_make_us_hold_more_than_a_frame(ours):
    """Held back before `ready`, what it sends stays in the kernel."""
    address = ours.listen("127.0.0.1", 0)
    with socket.create_connection(address) as stranger:
        stranger.sendall(opening())
        run(ours, until=len, make_ready=False)
        stranger.setblocking(False)
        for _ in range(200):
            with contextlib.suppress(BlockingIOError):
                stranger.send(frame(b"m" * 65536))
            ours.poll(0)
        held = ours.connections[1].received
        assert len(held) <= READ_BYTES + MAX_OPENING_BYTES


def test_a_peer_that_never_reads_is_lost_before_it_eats_the_memory(ours, theirs):
    peer = ours.connect(*theirs.listen("127.0.0.1", 0))
    run(ours, theirs, until=lambda a, b: a and b)
    for _ in range(6):
        ours.send(peer, bytes(MAX_MESSAGE_BYTES))
    (lost,) = ours.poll(0)
    assert "does not read" in lost.why


def test_too_many_strangers_are_turned_away(ours, monkeypatch):
    address = ours.listen("127.0.0.1", 0)
    monkeypatch.setattr(control_module, "MAX_OPENING_CONNECTIONS", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(address))
        for _ in range(10):
            ours.poll(0.001)
        assert len(ours.connections) == 3


def test_close_twice(ours, theirs):
    ours.connect(*theirs.listen("127.0.0.1", 0))
    ours.close()
    ours.close()
