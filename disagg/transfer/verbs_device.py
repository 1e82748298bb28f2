"""RDMA devices: what pyverbs opens and closes, and four calls that move many requests at once.

    Nic        context --> pd (protection domain) --> mr (memory region): lkey, rkey
                  |          '--------> qp (queue pair)  INIT --RTR, RTS--> connected --> ERROR
    QueuePair     '--> channel (fd) --> cq (completion queue) <--completions--'
    post_sends(send_wr[n])  post_receives()  poll() -> wc[n]  rearm()

The only file that imports pyverbs, which makes a Python object of every request and completion. So
the lists are numpy arrays of the C structs instead, and go to the driver as verbs.h itself sends
them: its `ibv_post_send`, `ibv_post_recv` and `ibv_poll_cq` are inline functions that call through
a table in `ibv_context`, whose layout every compiled program holds it to. What fails is a
`TransferError`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.resource import Resource
from disagg.transfer.interface import Memory, TransferError

MISSING = ""
try:
    from pyverbs import addr, cq, device, mr, pd, qp
    from pyverbs.pyverbs_error import PyverbsError
except ImportError as error:
    MISSING = (
        f"RDMA needs pyverbs, which cannot be imported ({error}); `apt-get install python3-pyverbs"
        " rdma-core ibverbs-providers`, and for the Python of a virtual environment `ln -s"
        f" /usr/lib/python3/dist-packages/pyverbs {sysconfig.get_path('platlib')}/`"
    )

# From verbs.h: its structs as elements of arrays. An immediate is big-endian on the wire, and `>u4`
# turns it both ways.
_HEAD = (("wr_id", "u8"), ("next", "u8"), ("sg_list", "u8"), ("num_sge", "i4"), ("opcode", "u4"))
_TAIL = (("send_flags", "u4"), ("imm", ">u4"), ("remote_addr", "u8"), ("rkey", "u4"), ("", "V76"))
RECV_WR, SEND_WR = np.dtype([*_HEAD]), np.dtype([*_HEAD, *_TAIL])
SGE = np.dtype([("addr", "u8"), ("length", "u4"), ("lkey", "u4")])
WC = np.dtype([("wr_id", "u8"), ("status", "u4"), ("", "V12"), ("imm", ">u4"), ("", "V20")])
RDMA_WRITE_WITH_IMM = 1
SEND_SIGNALED = 2
_LOCAL_WRITE, _REMOTE_WRITE, _RELAXED_ORDERING = 1, 2, 1 << 20
_RC, _ERROR, _QP_STATE = 2, 6, 1
#: Bytes from the start of `ibv_context` to its functions, and to the field that we may choose in
#: `ibv_cq` and `ibv_qp`; from `ibv_cq` to its channel, and from there to the descriptor.
_POLL_CQ, _POST_SEND, _POST_RECV = 96, 208, 216
_CQ_CONTEXT, _QP_CONTEXT, _CQ_CHANNEL, _CHANNEL_FD = 16, 8, 8, 8

#: The `wr_id` of every receive. Sends count from 1.
RECEIVE = 0
#: Completions that one `poll` takes.
POLL_COMPLETIONS = 1024
# Sent again after 4 us * 2^16 without an answer, 6 times (7 is "for ever" to soft-RoCE): an error
# after 2 to 8 s. A receiver with an empty queue is asked again after 0.16 ms, for ever (7).
_TIMEOUT, _RETRIES, _RNR_TIMER, _RNR_FOREVER = 16, 6, 8, 7
#: Of the statuses that users meet, beside the words of verbs.
_MEANING = {
    2: " (this NIC cannot send: did its link go down?)",
    4: " (this memory is not registered here)",
    5: " (the queue pair was stopped, or broke on a write that is not allowed)",
    10: " (the peer does not grant this memory: another address or key)",
    12: " (the peer's NIC does not answer)",
}

Requests = npt.NDArray[np.void]


class Address(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where a NIC's port is: its GID on RoCE; its LID on InfiniBand, where `gid` is empty."""

    gid: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{4}(:[0-9a-f]{4}){7})?$")]
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    mtu: Literal[256, 512, 1024, 2048, 4096]

    def __str__(self) -> str:
        return f"{f'GID {self.gid}' if self.gid else f'LID {self.lid}'}, MTU {self.mtu}"


class End(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A queue pair's number, and the number of the first packet (PSN) it sends."""

    qpn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class Nic(Resource):
    """A port of a device, open. `gid_index` None: it is addressed by its LID (InfiniBand)."""

    def __init__(self, name: str, port: int = 1, gid_index: int | None = None) -> None:
        self.name, self.port, self.gid_index = name, port, gid_index
        what = f"cannot open RDMA device {name}, port {port}, GID index {gid_index}"
        with _explained(what, "; `ibv_devinfo -v` shows what there is"):
            self.context = device.Context(name=name)
            found = self.context.query_port(port)
            gid = "" if gid_index is None else self.context.query_gid(port, gid_index).gid
            self.pd = pd.PD(self.context)
        self.address = Address(gid, found.lid, 128 << found.active_mtu)

    def __str__(self) -> str:
        return f"{self.name} port {self.port} ({self.address})"

    def register(self, memory: Memory) -> mr.MR:
        """Let the NIC read this memory, and peers write to it if it is `writable`, as long as the
        result is held: its `lkey` is for our own requests, its `rkey` for those of a peer."""
        access = _RELAXED_ORDERING | (_LOCAL_WRITE | _REMOTE_WRITE if memory.writable else 0)
        base, nbytes = base_of(memory), memory.nbytes
        with _explained(f"{self.name} cannot register {nbytes} bytes of {memory.device} memory"):
            if memory.device == "cpu":
                return mr.MR(self.pd, nbytes, access, base)
            return mr.DmaBufMR(self.pd, nbytes, access, memory.fd, base)

    def queue_pair(self, sends: int, receives: int, receive_chain: int) -> QueuePair:
        """One that holds so many of both; `post_receives` posts `receive_chain` of them."""
        return QueuePair(self, sends, receives, receive_chain)

    def close(self) -> None:
        """After its queue pairs. What is registered ends with it."""
        self.context.close()


class QueuePair(Resource):
    """One end of a reliable connection (RC), with a completion queue of its own.

    `fd` is readable once something completed after `rearm`.
    """

    def __init__(self, nic: Nic, sends: int, receives: int, receive_chain: int) -> None:
        self.nic = nic
        with _explained(
            f"{nic} cannot have a queue pair (RC, {sends} sends, {receives} receives)",
            "; does the device support RC, and are its limits (`ibv_devinfo -v`) that high?",
        ):
            self._channel = cq.CompChannel(nic.context)
            self._cq = cq.CQ(nic.context, sends + receives, self, self._channel, 0)
            self._cq.req_notify()
            cap = qp.QPCap(max_send_wr=sends, max_recv_wr=receives)
            init = qp.QPInitAttr(
                qp_type=_RC, qp_context=self, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0
            )
            attributes = qp.QPAttr(port_num=nic.port)
            attributes.qp_access_flags = _LOCAL_WRITE | _REMOTE_WRITE
            self._qp = qp.QP(nic.pd, init, attributes)
        self.qpn: int = self._qp.qp_num
        cq_struct = _struct_of(self._cq, _CQ_CONTEXT, self)
        qp_struct = _struct_of(self._qp, _QP_CONTEXT, self)
        self.fd = ctypes.c_int.from_address(_word(cq_struct + _CQ_CHANNEL) + _CHANNEL_FD).value
        self._completions = np.zeros(POLL_COMPLETIONS, WC)
        self._chain = np.zeros(receive_chain, RECV_WR)
        self._chain["next"][:-1] = _addresses(self._chain)[1:]
        self._rejected = np.zeros(1, np.uint64)  # where a post says which request it refused
        context, rejected = _word(cq_struct), self._rejected.ctypes.data
        poll, send, receive = (_function(context + at) for at in (_POLL_CQ, _POST_SEND, _POST_RECV))
        self._poll = partial(poll, cq_struct, POLL_COMPLETIONS, self._completions.ctypes.data)
        self._send = partial(send, qp_struct)
        self._receive = partial(receive, qp_struct, self._chain.ctypes.data, rejected)

    def __str__(self) -> str:
        return f"queue pair {self.qpn} of {self.nic}"

    def connect(self, own_psn: int, peer: End, address: Address) -> None:
        """To the peer's queue pair `peer` at `address`; from now on it can receive and send."""
        port, route = self.nic.port, None
        if address.gid:
            gid, index = addr.GID(address.gid), self.nic.gid_index
            route = addr.GlobalRoute(dgid=gid, sgid_index=index, hop_limit=64)
        # On InfiniBand packets travel by LID also if they carry GIDs (--gid-index). RoCE has none.
        path = addr.AHAttr(dlid=address.lid, is_global=bool(route), gr=route, port_num=port)
        mtu = min(self.nic.address.mtu, address.mtu)
        attributes = qp.QPAttr(port_num=port, path_mtu=mtu.bit_length() - 8)
        attributes.ah_attr, attributes.dest_qp_num = path, peer.qpn
        attributes.rq_psn, attributes.sq_psn = peer.psn, own_psn
        attributes.timeout, attributes.retry_cnt = _TIMEOUT, _RETRIES
        attributes.min_rnr_timer, attributes.rnr_retry = _RNR_TIMER, _RNR_FOREVER
        where = f"with queue pair {peer.qpn} at ({address})"
        hint = "; check that both addresses are in one network and --gid-index"
        for step, move in (("receive", self._qp.to_rtr), ("send", self._qp.to_rts)):
            with _explained(f"{self} cannot get ready to {step}, {where}", hint):
                move(attributes)

    def post_receives(self) -> None:
        """One chain of receives: each lets the peer write once with an immediate."""
        self._check("receive", self._receive())

    def post_sends(self, requests: Requests) -> None:
        """`SEND_WR`s that are chained by `next`. The array may be filled anew afterwards."""
        self._check("send", self._send(requests.ctypes.data, self._rejected.ctypes.data))

    def poll(self) -> Requests:
        """What has completed, as `WC`s `[0 to POLL_COMPLETIONS]`; valid until the next call."""
        found = self._poll()
        self._check("poll", min(found, 0))
        return self._completions[:found]

    def rearm(self) -> None:
        """`fd` was readable: take that, and ask for it again. What completed before is not said
        again, so poll once more after this."""
        with _explained(f"{self} cannot be watched"):
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)
            self._cq.req_notify()

    def fail(self) -> None:
        """To the error state: nothing is sent or taken in any more, and all that is posted comes
        back from `poll`, most of it flushed."""
        with _explained(f"{self} cannot be stopped"):
            self._qp.modify(qp.QPAttr(qp_state=_ERROR), _QP_STATE)

    def close(self) -> None:
        """Nothing that is posted is carried out any more. May be called twice."""
        for part in (self._qp, self._cq, self._channel):  # each holds on to the next one
            try:
                part.close()
            except PyverbsError as error:
                if error.error_code not in (errno.EIO, errno.ENODEV):  # the device is gone
                    raise

    def explain(self, status: int) -> str:
        """What a completion's status means."""
        return f"{cq.cqe_status_to_str(status)}{_MEANING.get(status, '')}"

    def _check(self, what: str, code: int) -> None:
        if code:
            raise TransferError(f"{self} cannot {what}: {os.strerror(abs(code))}")


def send_chain(length: int) -> tuple[Requests, Requests]:
    """Writes with an immediate and the one `SGE` of each, to be filled; the last one completes. Its
    end is such a chain too, from any element on."""
    requests, elements = np.zeros(length, SEND_WR), np.zeros(length, SGE)
    requests["next"][:-1] = _addresses(requests)[1:]
    requests["send_flags"][-1] = SEND_SIGNALED
    requests["sg_list"] = _addresses(elements)
    requests["num_sge"], requests["opcode"] = 1, RDMA_WRITE_WITH_IMM
    return requests, elements


def base_of(memory: Memory) -> int:
    """Where memory starts for a NIC, which counts from the start of a device's dma-buf (`fd`)."""
    return memory.address if memory.device == "cpu" else memory.fd_offset


def _addresses(array: Requests) -> npt.NDArray[np.uint64]:
    """Where each element lies."""
    return array.ctypes.data + np.arange(len(array), dtype=np.uint64) * array.itemsize


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _function(place: int) -> Callable[..., int]:
    """What the table in `ibv_context` holds there: three words in (the second may be a number), a
    number out. It neither blocks nor takes long, so Python's lock is kept (PYFUNCTYPE)."""
    word = ctypes.c_uint64
    return ctypes.PYFUNCTYPE(ctypes.c_int, word, word, word)(_word(place))


def _struct_of(wrapper: object, field: int, ours: object) -> int:
    """Where the C struct lies that a pyverbs object wraps: the one with `ours` in that field."""
    words = (ctypes.c_uint64 * (type(wrapper).__basicsize__ // 8)).from_address(id(wrapper))
    for word in words[2:]:  # after the reference count and the type
        if word > 1 << 16 and _word(word + field) == id(ours):
            return word
    raise TransferError(f"{type(wrapper)} is not laid out as expected; pyverbs 44 is known to be")


@contextmanager
def _explained(what: str, hint: str = "") -> Iterator[None]:
    """What pyverbs refuses, as a TransferError. Queue pairs take locked memory too."""
    try:
        yield
    except PyverbsError as error:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        codes = (errno.ENOMEM, errno.EPERM, errno.EAGAIN)
        if limit != resource.RLIM_INFINITY and getattr(error, "error_code", 0) in codes:
            hint += (
                f". The limit for locked memory is {limit} bytes (RLIMIT_MEMLOCK); raise it:"
                " `ulimit -l unlimited` in a shell, `--ulimit memlock=-1` for a container,"
                " `LimitMEMLOCK=infinity` in a systemd unit; or choose another --transport"
            )
        raise TransferError(f"{what}: {error}{hint}") from error
