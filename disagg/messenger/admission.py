"""What a node accepts from a peer: whom it greets, which requests it takes. Pure checks, no I/O.

Whatever would make bytes wrong is refused in Hello, by name and with both values; whatever could
never be served is refused at once, so that nobody waits for it.
"""

from collections.abc import Sequence

from disagg.kv_layout import pages_for
from disagg.messenger import messages
from disagg.messenger.messages import Hello, Identity, Role
from disagg.messenger.sharding import Slice, expected_count
from disagg.transfer.interface import TransferError

#: Most pages a probe may ask for.
MAX_PROBE_PAGES = 65536


def refusal(ours: Hello, theirs: Hello, *, accepts: Sequence[Role]) -> str | None:
    """Why this pair cannot work, or None. The text is for people on both sides."""
    if theirs.role not in accepts:
        return f"a {ours.role} works with a {' or a '.join(accepts)}, not with a {theirs.role}"
    if theirs.role == Role.PROBE:
        return None
    if theirs.identity is None:
        return f"a {theirs.role} says which model it holds; got a Hello without"
    for field in Identity.__struct_fields__:
        mine, other = getattr(ours.identity, field), getattr(theirs.identity, field)
        if mine != other:
            return (
                f"{field} differs: {ours.role} {mine}, {theirs.role} {other};"
                " start both nodes with the same model and flags"
            )
    tp, heads, num_ranks = theirs.tp, theirs.identity.num_kv_heads, len(theirs.kv_regions)
    if (heads % tp and tp % heads) or not num_ranks or num_ranks % tp:
        return (
            f"tp does not fit: {ours.role} {ours.tp}, {theirs.role} {tp} for {heads} KV heads and"
            f" {num_ranks} KV regions; expected a divisor or a multiple of {heads}, a region a rank"
        )
    return None


def fits(prefiller: Hello, num_tokens: int) -> str | None:
    """Why a prompt of `num_tokens` can never be prefilled there, or None. Both sides ask this."""
    assert prefiller.identity is not None, "only prefillers are asked"
    page_size = prefiller.identity.page_size
    num_pages = pages_for(num_tokens - 1, page_size)
    if num_tokens > prefiller.max_prompt_tokens:
        return (
            f"prompt of {num_tokens} tokens is too long: the model takes at most"
            f" {prefiller.max_prompt_tokens}"
        )
    if num_pages > prefiller.num_pages:
        return (
            f"prompt of {num_tokens} tokens needs {num_pages} pages of {page_size} tokens: the"
            f" prefiller's pool has {prefiller.num_pages}; start it with more --num-pages"
        )
    return None


def request_problem(
    request: messages.PrefillRequest, *, ours: Hello, theirs: Hello, slices: Sequence[Slice]
) -> str | None:
    """Why this request can never be served, or None."""
    assert ours.identity is not None, "a prefiller knows its model"
    num_tokens, pages = len(request.token_ids), request.page_indices
    too_long = fits(ours, num_tokens)
    if too_long is not None:
        return too_long
    num_pages = pages_for(num_tokens - 1, ours.identity.page_size)
    if len(pages) != num_pages or len(set(pages)) != num_pages:
        return f"expected {num_pages} different pages for {num_tokens} tokens, got {len(pages)}"
    num_groups = len(theirs.kv_regions) // theirs.tp
    in_memory = max(pages) < theirs.num_pages and request.tail_slot < theirs.num_tail_slots
    if not in_memory or request.dp_rank >= num_groups:
        return (
            f"page indices must lie below {theirs.num_pages}, tail_slot below"
            f" {theirs.num_tail_slots}, dp_rank below {num_groups}, as said in Hello"
        )
    count = expected_count(slices, ours.identity.num_layers, num_pages)
    if count != request.expected_count:
        return f"expected_count {request.expected_count} is not the {count} writes there would be"
    return None


def check_probe(probe: messages.ProbeRequest, scratch_bytes: int) -> None:
    """TransferError if a probe's request is not served. Its region's end is the engine's to see."""
    if not (0 < probe.page_bytes <= scratch_bytes and 0 < probe.num_pages <= MAX_PROBE_PAGES):
        raise TransferError(
            f"expected 1 to {MAX_PROBE_PAGES} pages of 1 to {scratch_bytes} bytes,"
            f" got {probe.num_pages} of {probe.page_bytes}"
        )
