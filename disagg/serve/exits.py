"""How a launch script ends: one line on standard error, one exit code, also when interrupted.

Imports nothing large, so that a script is ready to be interrupted as soon as it runs.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
#: As a shell shows the end by SIGINT, SIGPIPE and SIGTERM.
EXIT_INTERRUPTED, EXIT_UNREAD, EXIT_TERMINATED = 130, 141, 143


def run_script(main: Callable[[], int]) -> None:
    """Run a script's main and exit with its code; no traceback for an interrupt at any moment, nor
    for an output that nobody reads to its end.

    A ValueError or OSError says that the user asked for what cannot be: its text is one line for
    them, or empty if they know already.

    Until `main` says `interruptible()`, an interrupt ends the process the way the kernel does it:
    imports of large libraries do not survive a KeyboardInterrupt in good order.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # one that was closed must not become the number of a file of ours
    os.close(fd)
    try:
        code = main()
        print(end="", flush=True)  # there may be no stdout
    except BrokenPipeError:  # as with `| head -1`; Python's own end flushes what is left once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_UNREAD
    except (ValueError, OSError) as error:
        logger.info("this ends it", exc_info=True)
        if str(error):
            print(f"error: {error}", file=sys.stderr)
        code = EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is closed; Python's own end has no handler
    sys.exit(code)


def interruptible(*, verbose: bool) -> None:
    """From here on an interrupt is a KeyboardInterrupt, SIGTERM also ends with all closed in good
    order, and warnings are shown on stderr."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))
    level = logging.INFO if verbose else logging.WARNING
    # Forced: pyverbs sets up logging of its own when it is imported.
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr, force=True)
