"""`--check` against prefillers that serve, that do wrong, and against what is none at all."""

import argparse
import contextlib
import gc
import re
import socket
import threading

import msgspec
import pytest

from disagg.messenger import messages
from disagg.messenger.messages import PROBE_BYTES, probe_pattern
from disagg.messenger.prefiller import PrefillerMessenger
from disagg.serve import check as check_module
from disagg.serve.check import check
from disagg.serve.options import decode_parser
from disagg.transfer.interface import MessageReceived, Pages, WritesDone
from disagg.transfer.shm import ShmMedium
from disagg.transfer.tcp import TcpMedium
from disagg.transfer.transfer_engine import TransferEngine
from tests import sysfs_trees
from tests.engines import auto_engine, write
from tests.fake_verbs import FakeMachine
from tests.nodes import HeldNode, Oracle, ask, node_config, pair, prompt_of, tokens_of
from tests.prefiller_process import prefiller_process
from tests.protocol_world import IDENTITY
from tests.scripts import scripts
from tests.tiny_models import make_tiny_llama

LISTEN = ("127.0.0.1", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A mapping keeps a descriptor of its own until the last view is gone, and a closed node is a
    cycle of such views."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """Enough to be checked, not enough to be measured."""
    monkeypatch.setattr(check_module, "MEASURING", 0.02)
    monkeypatch.setattr(check_module, "REPEATS", 20)
    monkeypatch.setattr(check_module, "MOST_BYTES", 1 << 20)


@pytest.fixture
def look(capsys, monkeypatch):
    """Runs a check in this process; its exit code, its rows, what it says on stderr."""

    def look(where, *, transport="auto", patience=10.0):
        capsys.readouterr()
        monkeypatch.setattr(check_module, "PATIENCE", patience)
        asked = argparse.Namespace(check=where, transport=transport, prompts=[], prompts_file=None)
        code = check(asked)
        out, err = capsys.readouterr()
        return code, dict(re.findall(r"^(.{14})(.*)$", out, re.MULTILINE)), err

    return look


def failure(outcome):
    """The one line of a check that failed."""
    code, _, err = outcome
    assert code == 1
    assert err.startswith("error: prefiller ")
    assert len(err.splitlines()) == 1, err
    return err


@contextlib.contextmanager
def node(model, make_transfer=auto_engine):
    with HeldNode(node_config(model, listen=LISTEN), make_transfer=make_transfer) as started:
        yield started


# --- It works ---


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_every_transport(look, model, transport):
    with node(model) as started:
        code, rows, err = look(started.address, transport=transport)
        said = started._messenger.hello.identity
    assert (code, err) == (0, "")
    assert [row.strip() for row in rows] == [
        *("prefiller", "model", "pages", "refuses", "first write"),
        *("64 bytes", "1024 bytes", "4096 bytes", "16384 bytes", "65536 bytes"),
        *("counts", "contents"),
    ]
    used = {"auto": "shm"}.get(transport, transport)
    assert rows["prefiller     "] == f"greeted, writes by {used}"
    assert rows["model         "] == f"{said.model_fingerprint}, float32, 3 layers"
    assert rows["pages         "] == "4 tokens, HND, 1024 bytes"
    assert rows["counts        "].startswith("1000 writes asked for")


def test_a_prefiller_that_serves_goes_on_serving(look, model):
    """The check and requests at the same time, on one connection each."""
    prompts = [prompt_of(40, seed) for seed in range(12)]
    with pair(
        model,
        hold_prefiller={"make_transfer": auto_engine},
        hold_decoder={"make_transfer": auto_engine},
    ) as nodes:
        outcomes = []
        thread = threading.Thread(
            target=lambda: outcomes.append(look(nodes.prefiller.address, transport="tcp"))
        )
        thread.start()
        handles = [ask(nodes.decoder, prompt, 5) for prompt in prompts]
        found = [tokens_of(handle) for handle in handles]
        thread.join()
        nodes.wait_for_balance()
    oracle = Oracle(model)
    assert found == [oracle(prompt, 5) for prompt in prompts]
    assert outcomes[0][0] == 0


def test_the_script_answers_without_a_model(model, tmp_path):
    with node(model) as started, scripts(tmp_path) as run:
        where = "--check={}:{}".format(*started.address)
        outcome = run.start("run_decode.py", where).wait()
        assert (outcome.code, outcome.stderr) == (0, "")
        assert len(outcome.stdout.splitlines()) == 12
        outcome = run.start("run_decode.py", where, "a prompt").wait()
        assert (outcome.code, outcome.stdout) == (2, "")
        assert "leave out the prompts" in outcome.stderr_line


def test_prompts_are_refused():
    with pytest.raises(ValueError, match="leave out the prompts"):
        check(argparse.Namespace(prompts=[], prompts_file="file"))


# --- Prefillers that do wrong ---


class Wrong(TransferEngine):
    """Writes pages in a wrong way; `do` gets and returns what follows the regions."""

    def __init__(self, do):
        super().__init__([ShmMedium(), TcpMedium()])
        self.do = do

    def write_pages(self, peer, pages, imm):
        *writes, imm = self.do(*pages[2:], imm)
        return super().write_pages(peer, Pages(*pages[:2], *writes), imm)


def last_twice(page_bytes, sources, destinations, imm):
    more = [*range(len(sources)), len(sources) - 1]
    return page_bytes, sources[more], destinations[more], imm


def one_further(page_bytes, sources, destinations, imm):
    return page_bytes, sources, destinations + 1, imm


def longer(page_bytes, sources, destinations, imm):
    return page_bytes + 1, sources, destinations, imm


def shorter(page_bytes, sources, destinations, imm):
    return page_bytes - 1, sources, destinations, imm


def in_other_order(page_bytes, sources, destinations, imm):
    return page_bytes, sources[::-1].copy(), destinations, imm


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (last_twice, "of 1000 writes, more were counted"),
        (one_further, "bytes are wrong although 1 writes of 64 bytes came"),
        (longer, "1 bytes are wrong although 1 writes of 64 bytes came"),
        (shorter, "1 bytes are wrong although 1 writes of 64 bytes came"),
        (
            in_other_order,
            r"bytes are wrong although 4 writes of \d+ bytes came",
        ),
    ],
)
def test_writes_that_are_wrong_are_seen(look, model, do, why):
    with node(model, lambda: Wrong(do)) as started:
        assert re.search(why, failure(look(started.address)))


@pytest.mark.parametrize("lost", [1, 2])
def test_a_write_that_does_not_come_ends_the_wait(look, model, lost):
    """Of the first or of the second thousand, both of which are counted."""
    asked = []

    def fewer(page_bytes, sources, destinations, imm):
        asked.append(len(sources))
        kept = slice(999 if asked.count(1000) == lost and asked[-1] == 1000 else None)
        return page_bytes, sources[kept], destinations[kept], imm

    with node(model, lambda: Wrong(fewer)) as started:
        why = failure(look(started.address, patience=0.5))
    assert "waited 0.5 s for 1000 writes; is that node stopped?" in why


def test_bytes_that_changed_on_the_way_are_seen(look, model):
    with node(model) as started:
        assert (started._messenger._pattern == probe_pattern()).all()
        started._messenger._pattern[7] ^= 1
        assert "1 bytes are wrong although 1 writes of" in failure(look(started.address))


def test_what_is_refused_and_written_all_the_same_is_seen(look, model, monkeypatch):
    on_probe = PrefillerMessenger._on_probe

    def write_first(messenger, peer, link, probe):
        if probe.page_bytes > PROBE_BYTES:
            scratch = started._messenger._scratch
            transfer = started._transfer
            ticket = write(transfer, peer, scratch, 0, link.hello.tail_region, 64, 64, 9)
            while WritesDone(ticket=ticket) not in transfer.poll(
                0.01
            ):  # or the refusal is there first
                pass
        on_probe(messenger, peer, link, probe)

    monkeypatch.setattr(PrefillerMessenger, "_on_probe", write_first)
    with node(model) as started:
        assert "64 bytes are wrong although a refusal of 1 writes" in failure(look(started.address))


def test_what_is_not_refused_is_seen(look, model, monkeypatch):
    monkeypatch.setattr(messages, "MAX_PROBE_PAGES", 1 << 20)
    with node(model) as started:
        assert "expected a refusal of 65537 writes of 1 bytes, got ImmReached(" in failure(
            look(started.address, patience=0.5)
        )


def test_a_prefiller_that_dies_in_the_middle(look, model, monkeypatch):
    with prefiller_process(model) as process:
        count = check_module._Probe.count

        def kill_first(probe, num_writes):
            process.kill()
            return count(probe, num_writes)

        monkeypatch.setattr(check_module._Probe, "count", kill_first)
        why = failure(look(process.address))
    assert re.search("closed the connection|reset|broke", why), why


def test_a_prefiller_that_still_loads_is_not_reached_yet(look, model):
    """And neither can a decoder reach it; both are told what to wait for."""

    class Loading(HeldNode):
        def _build_engine(self):
            seen.append(look(where))
            with pytest.raises(ValueError) as refused:
                HeldNode(node_config(model, prefillers=(where,)))
            seen.append(str(refused.value))
            return super()._build_engine()

    seen = []
    with socket.socket() as unused:
        unused.bind(LISTEN)
        where = unused.getsockname()
    with Loading(node_config(model, listen=where), make_transfer=auto_engine):
        for text in (failure(seen[0]), seen[1]):
            assert (
                "Connection refused; check host and port, and that the node there has said" in text
            )
        assert look(where)[0] == 0


# --- What is no prefiller ---


@contextlib.contextmanager
def server(say):
    """Accepts; sends `say` if it is not None, and then no more."""
    held = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                held.append(connection)
                if say is not None:
                    connection.sendall(say)
                    connection.shutdown(socket.SHUT_WR)

    with socket.create_server(LISTEN) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (None, "sent no opening within 3 s; check host and port"),
        (b"", "closed the connection before its opening; check host and port"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does a disagg node listen there?"),
    ],
    ids=["silent", "hangs up", "http"],
)
def test_a_port_that_is_no_node(look, say, why):
    with server(say) as where:
        assert why in failure(look(where))


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a..b", "x" * 64])
def test_nobody_there(look, host):
    with socket.socket() as unused:
        unused.bind(LISTEN)
        port = unused.getsockname()[1]
        why = failure(look((host, port)))
    assert f"cannot connect to {host}:{port}: " in why
    assert "; check host and port" in why


def hello(role):
    return messages.Hello(
        epoch=1,
        role=role,
        identity=IDENTITY,
        num_pages=1,
        num_tail_slots=1,
        tp=1,
        kv_regions=(0,),
        tail_region=0,
    )


@contextlib.contextmanager
def node_that_says(*answers):
    """Answers the n-th message with the n-th of `answers`; None: ends the connection."""

    def serve():
        left = list(answers)
        while not stop.is_set():
            for event in engine.poll(0.05):
                if isinstance(event, MessageReceived) and left:
                    answer = left.pop(0)
                    if answer is None:
                        engine.close_peer(event.peer, "enough")
                    else:
                        engine.send(event.peer, answer)

    stop = threading.Event()
    with auto_engine() as engine:
        where = engine.listen(*LISTEN)
        thread = threading.Thread(target=serve)
        thread.start()
        yield where
        stop.set()
        thread.join()


OURS = messages.encode(hello("prefiller"))
REJECTED = messages.encode(messages.PrefillStopped(attempt_id=0, permanent=True, why="no"))


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([messages.encode(hello("decoder"))], "expected a prefiller, got Hello("),
        (
            [b"\x63" + OURS[1:]],
            f"ours {messages.PROTOCOL_VERSION}, theirs 99; run one release on both",
        ),
        (
            [messages.encode(messages.Goodbye(why="closing"))],
            "expected a prefiller, got Goodbye(why='closing')",
        ),
        ([], "waited 0.5 s for a prefiller; is that node stopped?"),
        ([OURS], "waited 0.5 s for a refusal of"),
        ([OURS, REJECTED, OURS], "expected a refusal of 1 writes of 4194305 bytes, got Hello("),
        ([OURS, *3 * [REJECTED], None], "closed the connection"),
    ],
    ids=["decoder", "version", "goodbye", "mute", "mute after Hello", "takes all", "hangs up"],
)
def test_a_node_that_is_no_good(look, answers, why):
    with node_that_says(*answers) as where:
        assert why in failure(look(where, patience=0.5))


def test_a_page_is_that_of_one_rank(look):
    identity = msgspec.structs.replace(IDENTITY, num_kv_heads=6, dtype="float32", page_size=5)
    sharded = msgspec.structs.replace(hello("prefiller"), identity=identity, tp=2)
    with node_that_says(messages.encode(sharded)) as where:
        _, rows, _ = look(where, patience=0.5)
    assert rows["pages         "] == f"5 tokens, HND, {3 * 2 * 5 * 4} bytes"


def test_another_transport(look, model):
    """The prefiller takes shm only, and says so in its opening."""
    with HeldNode(node_config(model, listen=LISTEN)) as started:
        why = failure(look(started.address, transport="tcp"))
    assert "give both the same --transport" in why


# --- RDMA ---

RDMA_FLAGS = (
    "--rdma-device=mlx5_8,mlx5_3",
    "--gid-index=1",
    "--nic-map=cpu=mlx5_4",
    "--poll-cpu=7",
)


@pytest.mark.parametrize(
    ("flags", "opened", "cpus"),
    [
        (("--transport=verbs",), [(f"mlx5_{number}", 1, 3) for number in range(8)], range(4)),
        (("--rdma-device=mlx5_8:1",), [("mlx5_8", 1, 3)], range(4)),
        (("--transport=verbs", "--nic-map=cpu=mlx5_4"), [("mlx5_4", 1, 3)], range(4, 8)),
        (RDMA_FLAGS, [("mlx5_4", 1, 1)], [7]),
    ],
)
def test_the_flags_for_rdma_are_those_of_a_node(monkeypatch, tmp_path, capsys, flags, opened, cpus):
    """Nobody listens there, so it ends when the NICs are open, and closes them."""
    sysfs_trees.eight_to_eight(tmp_path)
    machine = FakeMachine(monkeypatch, tmp_path)
    assert check(decode_parser().parse_args([f"--check=127.0.0.1:{free_port()}", *flags])) == 1
    assert sorted(machine.opened) == opened
    (polled_on,) = machine.polled_on
    assert polled_on & set(range(8)) == set(cpus)
    assert not any(machine.fabric.open.values())
    assert "cannot connect" in capsys.readouterr().err


def free_port():
    with socket.create_server(LISTEN) as server:
        return server.getsockname()[1]
