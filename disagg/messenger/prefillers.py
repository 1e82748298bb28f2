"""The prefillers a decoder knows: connecting, greeting, choosing one, connecting again.

DOWN --connect--> GREETING --Hello fits--> READY
 ^                   |                       |
 '---- lost, refused, silent: try again after a delay
"""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from disagg.messenger.admission import check_hello
from disagg.messenger.messages import Hello, ProtocolError, Role
from disagg.messenger.messenger import Wiring
from disagg.messenger.sharding import Slice, make_plan
from disagg.transfer.interface import Peer

Address = tuple[str, int]

#: Longest pause between two tries to connect, in seconds.
MAX_DELAY = 2.0


class Prefiller(msgspec.Struct, kw_only=True):
    """One address: DOWN without `peer`, GREETING until `hello` came, then READY.

    `num_failures` counts attempts that failed since the last one that worked. `delay` is the pause
    before the next connection, in seconds; `epoch` of the last process that answered here.
    `clock_lag` is the smallest (received - sent) of its heartbeats, in seconds: how far our clock
    is ahead of its, and the travel of the fastest beat. A `retired` address turned out to be
    another's second name.
    """

    address: Address
    peer: Peer = 0
    hello: Hello | None = None
    slices: tuple[Slice, ...] = ()
    retry_at: float = 0.0
    num_failures: int = 0
    delay: float = 0.0
    epoch: int | None = None
    clock_lag: float = math.inf
    retired: bool = False


class NoPrefiller(msgspec.Struct, frozen=True, kw_only=True):
    """Why no prefiller can take a prompt. `permanent`: none of all there are could ever take it."""

    why: str
    permanent: bool


class Prefillers:
    """All prefillers of one decoder. `on_link(address, ready, why)` reports each change."""

    def __init__(
        self,
        addresses: Sequence[Address],
        wiring: Wiring,
        on_link: Callable[[Address, bool, str], None],
    ) -> None:
        self._prefillers = [Prefiller(address=address) for address in dict.fromkeys(addresses)]
        self._wiring = wiring
        self._on_link = on_link

    def __len__(self) -> int:
        return len(self._prefillers)

    def connect_due(self) -> list[Peer]:
        """Start the connections whose time has come; a Hello is due on each."""
        now = self._wiring.clock()
        due = [p for p in self._prefillers if not (p.peer or p.retired or now < p.retry_at)]
        for prefiller in due:
            prefiller.peer = self._wiring.transfer.connect(*prefiller.address)
        return [prefiller.peer for prefiller in due]

    def ready(self) -> list[Prefiller]:
        """Those that may be asked."""
        return [prefiller for prefiller in self._prefillers if prefiller.hello is not None]

    def choose(self, num_pages: int, load: Mapping[Peer, int]) -> Prefiller | NoPrefiller:
        """For a prompt: the one with the fewest recent failures, then the least `load`."""
        sizes = [(p, p.hello.num_pages) for p in self._prefillers if p.hello is not None]
        able = [p for p, size in sizes if num_pages <= size]
        if able:
            return min(able, key=lambda p: (p.num_failures, load[p.peer]))
        if not sizes:
            return NoPrefiller(why="no prefiller is connected", permanent=False)
        most = max(size for _, size in sizes)
        why = f"prompt needs {num_pages} pages: a prefiller's pool has {most}; raise --num-pages"
        return NoPrefiller(why=why, permanent=len(sizes) == len(self._prefillers))

    def greet(self, peer: Peer, hello: Hello) -> None:
        """A prefiller answered with its Hello: READY, or a ProtocolError if it cannot be."""
        prefiller = self._by_peer(peer)
        check_hello(self._wiring.hello, hello, accepts=(Role.PREFILLER,))
        twin = next((p for p in self._prefillers if p.epoch == hello.epoch), prefiller)
        if twin is not prefiller:  # rule 8 would end one connection for the other for ever
            prefiller.retired = True
            raise ProtocolError(f"the prefiller {twin.address[0]}:{twin.address[1]} again")
        prefiller.epoch, prefiller.delay, prefiller.hello = hello.epoch, 0.0, hello
        memory = self._wiring.memory
        # Any of the replica sets: all have the same count, and that is all they are for here.
        prefiller.slices = make_plan(memory.page, hello.tp, memory.tp)[0]
        self._on_link(prefiller.address, True, "ready")

    def on_beat(self, peer: Peer, clock_ns: int) -> None:
        """A prefiller has said what its clock showed."""
        prefiller, lag = self._by_peer(peer), self._wiring.clock() - clock_ns / 1e9
        prefiller.clock_lag = min(prefiller.clock_lag, lag)
        self._wiring.trace.facts[f"clock lag of {prefiller.epoch}"] = prefiller.clock_lag

    def lost(self, peer: Peer, why: str) -> None:
        """The connection is over: down, until it is tried again."""
        prefiller = self._by_peer(peer)
        prefiller.peer, prefiller.hello, prefiller.clock_lag = 0, None, math.inf
        # Whoever refuses or is away will do so for a while: ask less and less often.
        shortest = self._wiring.config.reconnect_interval
        prefiller.delay = min(max(shortest, 2 * prefiller.delay), MAX_DELAY)
        prefiller.retry_at = self._wiring.clock() + prefiller.delay
        self._on_link(prefiller.address, False, why)

    def _by_peer(self, peer: Peer) -> Prefiller:
        return next(p for p in self._prefillers if p.peer == peer)
