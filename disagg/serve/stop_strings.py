"""Finding stop strings in text that grows, and never showing a part of one.

    stop "END"      the text so far   "the E"   "the EN"   "the ENemy EN"   "the ENemy END of"
                    visible           "the "    "the "     "the ENemy "     "the ENemy ", stopped

What could be the beginning of a stop string is held back, and shown when it turns out not to be.
Where two stop strings are found, the one that is complete first ends the text; of two that end at
the same character, the longer one. So what is shown does not depend on how the text came in pieces.
"""

from collections.abc import Sequence


def visible(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """What may be shown of a text that goes on, and whether a stop string was found in it."""
    starts = [(text.find(string), string) for string in stop if string in text]
    if starts:
        _, start = min((start + len(string), start) for start, string in starts)
        return text[:start], True
    beginnings = (string[:count] for string in stop for count in range(1, len(string)))
    num_held = max((len(start) for start in beginnings if text.endswith(start)), default=0)
    return text[: len(text) - num_held], False
