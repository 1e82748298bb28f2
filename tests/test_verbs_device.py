"""What pyverbs and the functions behind it are asked for, in which order, and what errors say.

pyverbs is a stand-in here; that real structs lie where they are looked for is seen in `rdma_vm`.
"""

import ctypes
import errno
import os
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from disagg.transfer import verbs_device
from disagg.transfer.interface import Memory, TransferError
from disagg.transfer.verbs_device import (
    RDMA_WRITE_WITH_IMM,
    RECEIVE,
    SEND_SIGNALED,
    WC,
    Address,
    End,
    Nic,
    QueuePair,
    base_of,
    send_chain,
)

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 3)


class Error(Exception):
    def __init__(self, text, error_code=-1):
        super().__init__(f"{text}. Errno: {error_code}")
        self.error_code = error_code


class Attributes(SimpleNamespace):
    """Any struct of attributes: keeps what it is given."""


class Verbs:
    """Stands in for pyverbs: `calls` has what was asked for, `failing` names what fails with which
    errno; `codes` are what the functions behind it return."""

    def __init__(self):
        self.calls, self.failing, self.codes = [], {}, {}
        self.port = Attributes(state=4, lid=0, active_mtu=3)
        self.gid = "fe80:0000:0000:0000:0000:0000:0000:0001"
        self.completions = []
        # ibv_context with its functions, ibv_comp_channel, and one struct for cq and qp.
        self.functions = {
            offset: FUNCTION(lambda *words, name=name: self.function(name, *words))
            for name, offset in (("poll", 96), ("send", 208), ("receive", 216))
        }
        self.context = (ctypes.c_uint64 * 64)()
        for offset, function in self.functions.items():
            self.context[offset // 8] = ctypes.cast(function, ctypes.c_void_p).value
        self.channel = (ctypes.c_int * 4)(0, 0, 77, 0)
        self.struct = (ctypes.c_uint64 * 4)(
            ctypes.addressof(self.context), ctypes.addressof(self.channel)
        )

    def function(self, name, owner, second, third):
        assert owner == ctypes.addressof(self.struct)
        self.calls.append(name)
        if name == "poll":
            found = np.array(self.completions[:second], WC)
            ctypes.memmove(third, found.ctypes.data, found.nbytes)
            return self.codes.get(name, len(found))
        return self.codes.get(name, 0)

    def do(self, name, *arguments, **keywords):
        self.calls.append((name, *arguments, *keywords.values()) if arguments or keywords else name)
        if name in self.failing:
            raise Error(f"{name} failed", self.failing[name])

    def make(self, name, **attributes):
        """A class of pyverbs: notes its making and its close."""

        def new(*arguments, **keywords):
            self.do(name, *arguments[1:], **keywords)
            return Attributes(
                close=lambda: self.do(f"close {name}"), **attributes, made_of=arguments
            )

        return new


@pytest.fixture
def stand_in(monkeypatch):
    stand_in = Verbs()

    def context(name):
        stand_in.do("open", name)
        return Attributes(
            query_port=lambda port: (stand_in.do("query_port", port), stand_in.port)[1],
            query_gid=lambda port, index: (
                stand_in.do("query_gid", port, index),
                Attributes(gid=stand_in.gid),
            )[1],
            close=lambda: stand_in.do("close context"),
        )

    moves = {
        name: (lambda *arguments, name=name: stand_in.do(name, *arguments))
        for name in ("to_rtr", "to_rts", "modify", "req_notify", "get_cq_event", "ack_events")
    }
    monkeypatch.setattr(verbs_device, "MISSING", "")
    for name, module in {
        "PyverbsError": Error,
        "device": Attributes(Context=context),
        "pd": Attributes(PD=stand_in.make("pd")),
        "mr": Attributes(
            MR=stand_in.make("MR", lkey=11, rkey=12),
            DmaBufMR=stand_in.make("DmaBufMR", lkey=13, rkey=14),
        ),
        "cq": Attributes(
            CompChannel=stand_in.make("channel", get_cq_event=moves["get_cq_event"]),
            CQ=stand_in.make("cq", req_notify=moves["req_notify"], ack_events=moves["ack_events"]),
            cqe_status_to_str=lambda status: f"status {status}",
        ),
        "qp": Attributes(
            QPCap=Attributes,
            QPInitAttr=Attributes,
            QPAttr=Attributes,
            QP=stand_in.make("qp", qp_num=99, **moves),
        ),
        "addr": Attributes(GID=lambda gid: gid, GlobalRoute=Attributes, AHAttr=Attributes),
        "_struct_of": lambda *_: ctypes.addressof(stand_in.struct),
    }.items():
        monkeypatch.setattr(verbs_device, name, module, raising=False)
    return stand_in


@pytest.fixture
def nic(stand_in):
    return Nic("mlx5_0", 2, 3)


@pytest.fixture
def pair(nic, stand_in):
    pair = nic.queue_pair(8, 16, 4)
    stand_in.calls.clear()
    return pair


# --- Without it ---


def test_without_pyverbs_all_can_be_imported_and_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['pyverbs'] = None\n"
        "from disagg.transfer.auto import make_engine, open_nics\n"
        "from disagg.transfer.topology import RdmaFlags\n"
        "make_engine('auto', open_nics('auto', RdmaFlags())[0]).close()\n"
        "open_nics('verbs', RdmaFlags())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert "RDMA needs pyverbs" in said
    assert "apt-get install python3-pyverbs rdma-core ibverbs-providers" in said
    site = sysconfig.get_path("platlib")
    assert f"`ln -s /usr/lib/python3/dist-packages/pyverbs {site}/`" in said


@pytest.mark.parametrize("step", ["open", "query_port", "query_gid", "pd"])
def test_a_nic_that_cannot_be_opened_says_which_and_what_to_look_at(stand_in, step):
    stand_in.failing[step] = errno.EACCES
    with pytest.raises(TransferError) as error:
        Nic("mlx5_7", 2, 5)
    for part in ("mlx5_7", "port 2", "GID index 5", f"{step} failed", "ibv_devinfo -v"):
        assert part in str(error.value)


def test_a_nic_without_a_gid_index_is_addressed_by_its_lid(stand_in):
    stand_in.port.lid = 9
    assert Nic("mlx5_0").address == Address("", 9, 1024)


def test_a_nic_ends_with_all_that_it_made(nic, stand_in):
    """pyverbs closes what is open of a device before the device."""
    nic.close()
    assert stand_in.calls[-1] == "close context"


def test_an_address_is_that_of_the_port_and_gid_asked_for(nic, stand_in):
    assert nic.address == Address(stand_in.gid, 0, 1024)
    assert ("query_port", 2) in stand_in.calls
    assert ("query_gid", 2, 3) in stand_in.calls


# --- Memory ---


def test_memory_is_registered_for_those_who_may_use_it(nic, stand_in):
    """2**20 is relaxed ordering, 2 a peer's writes, which need 1, our own."""
    for writable, access in ((True, 2**20 + 3), (False, 2**20)):
        found = nic.register(Memory(address=4096, nbytes=100, writable=writable))
        assert stand_in.calls[-1] == ("MR", 100, access, 4096)
        assert (found.lkey, found.rkey) == (11, 12)


def test_memory_of_a_device_is_a_dma_buf_which_starts_at_its_offset(nic, stand_in):
    memory = Memory(address=1 << 40, nbytes=100, fd=5, fd_offset=4096, device="cuda:1")
    found = nic.register(memory)
    assert stand_in.calls[-1] == ("DmaBufMR", 100, 2**20 + 3, 5, 4096)
    assert (found.lkey, found.rkey) == (13, 14)
    assert base_of(memory) == 4096
    assert base_of(Memory(address=100, nbytes=1, fd=5, fd_offset=4096)) == 100


@pytest.fixture
def locked_memory_limit():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM])
def test_too_little_lockable_memory_is_said_with_how_to_raise_it(
    nic, stand_in, locked_memory_limit, code
):
    stand_in.failing["MR"] = code
    with pytest.raises(TransferError) as error:
        nic.register(Memory(address=4096, nbytes=1 << 30))
    for part in (
        *("mlx5_0", f"{1 << 30} bytes", "limit for locked memory is 65536 bytes"),
        *("ulimit -l unlimited", "--ulimit memlock=-1", "LimitMEMLOCK=infinity", "--transport"),
    ):
        assert part in str(error.value)


def test_other_errors_do_not_blame_the_limit(nic, stand_in, locked_memory_limit):
    stand_in.failing["MR"] = errno.EINVAL
    with pytest.raises(TransferError) as error:
        nic.register(Memory(address=4096, nbytes=8))
    assert "limit" not in str(error.value)


# --- Queue pairs ---


def test_a_queue_pair_has_a_completion_queue_for_all_that_is_posted(nic, stand_in):
    pair = nic.queue_pair(8, 16, 4)
    made = {call[0]: call[1:] for call in stand_in.calls if isinstance(call, tuple)}
    assert made["cq"][0] == 8 + 16
    init, attributes = made["qp"]
    assert (init.qp_type, init.sq_sig_all) == (2, 0)
    assert (init.cap.max_send_wr, init.cap.max_recv_wr) == (8, 16)
    assert (attributes.port_num, attributes.qp_access_flags) == (2, 3)
    assert "req_notify" in stand_in.calls
    assert (pair.qpn, pair.fd) == (99, 77)


@pytest.mark.parametrize("step", ["channel", "cq", "qp"])
def test_a_queue_pair_that_cannot_be_had_says_what_was_wanted(nic, stand_in, step):
    stand_in.failing[step] = errno.EOPNOTSUPP
    with pytest.raises(TransferError) as error:
        nic.queue_pair(8, 16, 4)
    for part in (f"mlx5_0 port 2 (GID {stand_in.gid}, MTU 1024)", "RC, 8 sends, 16 receives"):
        assert part in str(error.value)


def test_roce_is_addressed_by_gid(pair, stand_in):
    far = Address("fe80:0000:0000:0000:0000:0000:0000:0002", 0, 512)
    pair.connect(5, End(123, 6), far)
    (ready, attributes), (send, same) = stand_in.calls
    assert (ready, send) == ("to_rtr", "to_rts")
    assert attributes is same
    path = attributes.ah_attr
    assert (path.is_global, path.gr.dgid, path.gr.sgid_index) == (1, far.gid, 3)
    assert path.gr.hop_limit > 1  # it may pass routers
    assert (path.port_num, attributes.path_mtu) == (2, 2)  # 512: what both can
    assert (attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn) == (123, 6, 5)
    assert (attributes.rnr_retry, attributes.retry_cnt) == (7, 6)


def test_infiniband_is_addressed_by_lid(stand_in):
    stand_in.port.lid = 9
    pair = Nic("mlx5_0").queue_pair(8, 16, 4)
    pair.connect(5, End(123, 6), Address("", 17, 4096))
    _, attributes = stand_in.calls[-1]
    assert attributes.ah_attr == Attributes(dlid=17, is_global=0, gr=None, port_num=1)
    assert attributes.path_mtu == 3


def test_infiniband_with_an_entry_asked_for_has_both_addresses(stand_in):
    """As some ports and virtual functions need: the GID in the packet, the LID to get there."""
    stand_in.port.lid = 9
    nic = Nic("mlx5_0", 1, 0)
    assert (nic.address.gid, nic.address.lid) == (stand_in.gid, 9)
    far = Address("fe80:0000:0000:0000:0000:0000:0000:0002", 17, 4096)
    nic.queue_pair(8, 16, 4).connect(5, End(123, 6), far)
    path = stand_in.calls[-1][1].ah_attr
    assert (path.dlid, path.is_global, path.gr.dgid, path.gr.sgid_index) == (17, 1, far.gid, 0)


@pytest.mark.parametrize(("step", "what"), [("to_rtr", "receive"), ("to_rts", "send")])
@pytest.mark.parametrize("gid", ["", "fe80:0000:0000:0000:0000:0000:0000:0002"])
def test_a_step_that_fails_names_itself_and_both_ends(pair, stand_in, step, what, gid):
    stand_in.failing[step] = errno.EINVAL
    far = Address(gid, 17, 2048)
    with pytest.raises(TransferError) as error:
        pair.connect(5, End(123, 6), far)
    for part in (
        *(f"cannot get ready to {what}", "queue pair 99 of mlx5_0 port 2", stand_in.gid),
        *("queue pair 123", gid or "LID 17", "MTU 2048", "MTU 1024", "--gid-index"),
    ):
        assert part in str(error.value)


def test_posts_and_polls_go_to_the_driver(pair, stand_in):
    requests, _ = send_chain(3)
    pair.post_sends(requests)
    pair.post_receives()
    assert stand_in.calls == ["send", "receive"]
    stand_in.completions = [(7, 0, b"", 42, b""), (RECEIVE, 5, b"", 0x01020304, b"")]
    found = pair.poll()
    assert found["wr_id"].tolist() == [7, RECEIVE]
    assert found["status"].tolist() == [0, 5]
    assert found["imm"].tolist() == [42, 0x01020304]
    stand_in.completions = []
    assert len(pair.poll()) == 0


def test_receives_are_a_chain_of_what_was_asked_for(pair):
    chain = pair._chain
    assert len(chain) == 4
    here = chain.ctypes.data
    assert chain["next"].tolist() == [here + 32, here + 64, here + 96, 0]
    assert not chain["wr_id"].any()
    assert not chain["num_sge"].any()


def test_sends_are_chained_each_with_its_element():
    requests, elements = send_chain(3)
    here, there = requests.ctypes.data, elements.ctypes.data
    assert requests["next"].tolist() == [here + 128, here + 256, 0]
    assert requests["send_flags"].tolist() == [0, 0, SEND_SIGNALED]
    assert (set(requests["num_sge"]), set(requests["opcode"])) == ({1}, {RDMA_WRITE_WITH_IMM})
    assert requests["sg_list"].tolist() == [there, there + 16, there + 32]
    assert requests.dtype.fields["rkey"][1] == 48
    assert WC.itemsize == 48


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("send", lambda pair: pair.post_sends(send_chain(1)[0])),
        ("receive", lambda pair: pair.post_receives()),
        ("poll", lambda pair: pair.poll()),
    ],
)
def test_what_the_driver_refuses_is_an_error_that_names_the_queue_pair(pair, stand_in, name, act):
    stand_in.codes[name] = -errno.EIO
    with pytest.raises(TransferError, match=f"queue pair 99 of mlx5_0.* cannot {name}: Input/out"):
        act(pair)


def test_an_event_is_taken_and_acknowledged_before_the_next_is_asked_for(pair, stand_in):
    pair.rearm()
    names = [call if isinstance(call, str) else call[0] for call in stand_in.calls]
    assert names == ["get_cq_event", "ack_events", "req_notify"]
    stand_in.failing["get_cq_event"] = errno.EIO
    with pytest.raises(TransferError, match="cannot be watched"):
        pair.rearm()


def test_failing_moves_to_the_error_state_alone(pair, stand_in):
    pair.fail()
    assert stand_in.calls == [("modify", Attributes(qp_state=6), 1)]
    stand_in.failing["modify"] = errno.EIO
    with pytest.raises(TransferError, match="cannot be stopped"):
        pair.fail()


def test_closing_goes_from_the_queue_pair_to_the_channel(pair, stand_in):
    pair.close()
    assert stand_in.calls == ["close qp", "close cq", "close channel"]


def test_closing_on_a_device_that_is_gone_is_no_error(pair, stand_in):
    stand_in.failing |= {"close qp": errno.EIO, "close cq": errno.ENODEV}
    pair.close()
    assert stand_in.calls[-1] == "close channel"
    stand_in.failing["close qp"] = errno.EBUSY
    with pytest.raises(Error, match="close qp"):
        pair.close()


def test_a_status_is_explained(pair):
    assert "the peer's NIC does not answer" in pair.explain(12)
    assert pair.explain(3) == "status 3"


def test_a_struct_is_found_by_the_mark_in_it():
    mark, other = object(), object()

    class Wrapper:
        __slots__ = ("first", "second")

    wrapper = Wrapper()
    # A list's words: count, type, size, items; the third is not a pointer to our mark.
    wrapper.first, wrapper.second = [other], (mark,)
    # A tuple holds its first element 24 bytes from its start.
    assert verbs_device._struct_of(wrapper, 24, mark) == id(wrapper.second)
    with pytest.raises(TransferError, match="not laid out as expected"):
        verbs_device._struct_of(wrapper, 24, object())


@pytest.mark.skipif(
    not os.environ.get("RDMA_DEVICES"), reason="needs RDMA_DEVICES; see tests/engines.py"
)
def test_a_real_queue_pair_is_found_behind_its_wrapper():
    name, port, gid_index = os.environ["RDMA_DEVICES"].split()[0].split("/")
    with Nic(name, int(port), int(gid_index)) as nic, QueuePair(nic, 8, 16, 4) as pair:
        assert str(Path(f"/proc/self/fd/{pair.fd}").readlink()).startswith("anon_inode:")
        pair.post_receives()
        pair.fail()
        assert pair.poll()["wr_id"].tolist() == [RECEIVE] * 4
