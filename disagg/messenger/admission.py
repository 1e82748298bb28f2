"""What a node accepts from a peer: whom it greets, which requests it takes. Pure checks, no I/O.

Whatever would make bytes wrong is refused in Hello, by name and with both values; whatever could
never be served is refused at once, so that nobody waits for it.
"""

from collections.abc import Sequence

from disagg.kv_layout import KVLayout, pages_for
from disagg.messenger import messages
from disagg.messenger.messages import Hello, Identity, ProtocolError, Role
from disagg.messenger.sharding import Slice, expected_count

#: Whom a node of a role greets.
ACCEPTS = {Role.PREFILLER: (Role.DECODER, Role.PROBE), Role.DECODER: (Role.PREFILLER,)}


def check_hello(ours: Hello, theirs: Hello) -> None:
    """ProtocolError if this pair cannot work. The text is for people on both sides."""
    if theirs.role not in (accepts := ACCEPTS[ours.role]):
        raise ProtocolError(
            f"a {ours.role} works with a {' or a '.join(accepts)}, not with a {theirs.role}"
        )
    if theirs.role == Role.PROBE:
        return
    if theirs.identity is None:
        raise ProtocolError(f"a {theirs.role} says which model it holds; got a Hello without")
    for field in Identity.__struct_fields__:
        mine, other = getattr(ours.identity, field), getattr(theirs.identity, field)
        if mine != other:
            raise ProtocolError(
                f"{field} differs: {ours.role} {mine}, {theirs.role} {other};"
                " start both nodes with the same model and flags"
            )
    tp, heads, num_ranks = theirs.tp, theirs.identity.num_kv_heads, len(theirs.kv_regions)
    if (heads % tp and tp % heads) or not num_ranks or num_ranks % tp:
        raise ProtocolError(
            f"tp does not fit: {ours.role} {ours.tp}, {theirs.role} {tp} for {heads} KV heads and"
            f" {num_ranks} KV regions; expected a divisor or a multiple of {heads}, a region a rank"
        )


def check_request(
    request: messages.PrefillRequest, *, layout: KVLayout, theirs: Hello, slices: Sequence[Slice]
) -> None:
    """ValueError for a request whose writes would go to a wrong place, or be more or fewer than the
    decoder counts. `layout` is ours, `theirs` the decoder's Hello, `slices` any replica set."""
    pages, num_groups = request.page_indices, len(theirs.kv_regions) // theirs.tp
    num_pages = pages_for(len(request.token_ids) - 1, layout.page_size)
    count = expected_count(slices, layout.num_layers, num_pages)
    rules = {
        f"{num_pages} different pages": len(pages) == len(set(pages)) == num_pages,
        f"page indices below {theirs.num_pages}": max(pages, default=0) < theirs.num_pages,
        f"a tail_slot below {theirs.num_tail_slots}": request.tail_slot < theirs.num_tail_slots,
        f"a dp_rank below {num_groups}": request.dp_rank < num_groups,
        f"an expected_count of {count}": request.expected_count == count,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"expected {', '.join(broken)}; got {request!s:.400}")
