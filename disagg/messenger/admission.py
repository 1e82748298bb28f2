"""What a node accepts from a peer: whom it greets, which requests it takes. Pure checks, no I/O.

Whatever would make bytes wrong is refused in Hello, by name and with both values; whatever could
never be served is refused at once, so that nobody waits for it.
"""

from collections.abc import Sequence

from disagg.kv_layout import pages_for
from disagg.messenger import messages
from disagg.messenger.messages import Hello, HelloRefused, ProtocolError, Role
from disagg.messenger.sharding import Slice, expected_count
from disagg.transfer.interface import MAX_IMM

#: Most pages a probe may ask for, and most bytes.
MAX_PROBE_PAGES = 65536
MAX_PROBE_BYTES = 1 << 30


def refusal(ours: Hello, theirs: Hello, *, accepts: Sequence[Role]) -> HelloRefused | None:
    """Why this pair cannot work, or None. A ProtocolError if their Hello contradicts itself."""
    if theirs.role not in accepts:
        wanted = f"{ours.role} for a {' or a '.join(accepts)}"
        return HelloRefused(field="role", ours=wanted, theirs=theirs.role)
    if theirs.role == Role.PROBE:
        return None
    if ours.identity is None or theirs.identity is None:
        raise ProtocolError(f"a {theirs.role} says which model it holds; got a Hello without")
    if len(theirs.kv_regions) != theirs.identity.tp or theirs.num_pages < 1:
        raise ProtocolError(
            f"a Hello of tp {theirs.identity.tp} with {len(theirs.kv_regions)} regions of"
            f" {theirs.num_pages} pages"
        )
    return messages.first_difference(ours.identity, theirs.identity)


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
    if num_tokens < 2:
        return f"a prompt of {num_tokens} tokens leaves nothing to prefill; expected at least 2"
    too_long = fits(ours, num_tokens)
    if too_long is not None:
        return too_long
    num_pages = pages_for(num_tokens - 1, ours.identity.page_size)
    if len(pages) != num_pages or len(set(pages)) != num_pages:
        return f"expected {num_pages} different pages for {num_tokens} tokens, got {len(pages)}"
    if not all(0 <= page < theirs.num_pages for page in pages):
        return f"page indices must lie in 0..{theirs.num_pages - 1} as said in Hello"
    if not 0 <= request.num_held_pages <= num_pages:
        return f"num_held_pages must lie in 0..{num_pages}, got {request.num_held_pages}"
    if not 0 <= request.tail_slot < theirs.num_tail_slots:
        return f"tail_slot must lie in 0..{theirs.num_tail_slots - 1}, got {request.tail_slot}"
    if request.destination_rank != 0:
        return f"destination_rank must be 0, got {request.destination_rank}"
    if not 0 < request.imm <= MAX_IMM:
        return f"imm must lie in 1..{MAX_IMM}, got {request.imm}"
    num_layers = ours.identity.num_layers
    count = expected_count(slices, num_layers, num_pages - request.num_held_pages)
    if count != request.expected_count:
        return f"expected_count {request.expected_count} is not the {count} writes there would be"
    return None


def probe_problem(probe: messages.ProbeRequest, scratch_bytes: int) -> str | None:
    """Why a probe's request is not served, or None."""
    if not 0 < probe.page_bytes <= scratch_bytes:
        return f"page_bytes must lie in 1..{scratch_bytes}, got {probe.page_bytes}"
    limit = min(MAX_PROBE_PAGES, MAX_PROBE_BYTES // probe.page_bytes)
    if not 0 < probe.num_pages <= limit:
        return (
            f"num_pages of {probe.page_bytes} bytes must lie in 1..{limit}, got {probe.num_pages}"
        )
    if not 0 < probe.imm <= MAX_IMM:
        return f"imm must lie in 1..{MAX_IMM}, got {probe.imm}"
    return None
