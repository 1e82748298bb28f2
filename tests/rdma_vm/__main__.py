"""Run something where there are RDMA devices: in emulated machines with soft-RoCE.

    python -m tests.rdma_vm one ibv_devinfo
    python -m tests.rdma_vm two bash -c 'echo this is machine $NODE'
    python -m tests.rdma_vm bench

The machines see this host's files as they are, and keep what they write to themselves. One machine
has rxe0 (10.99.0.1) and rxe1 (10.99.1.1); of two, each has rxe0 (10.99.0.1 and 10.99.0.2). The exit
code is the command's.
"""

from __future__ import annotations

import argparse
import signal
import sys

from tests.rdma_vm.kernel import CannotBootError
from tests.rdma_vm.machines import MOST_SECONDS, JobFailedError, run

#: Of a shell, for a command that cannot be run.
EXIT_CANNOT_RUN = 126


def main() -> int:
    """Parse the command line and run the machines."""
    parser = argparse.ArgumentParser(prog="python -m tests.rdma_vm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("machines", choices=["one", "two", "bench"])
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="most time (3600)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command
    if arguments.machines == "bench":
        command = ["python", "-m", "tests.rdma_vm.bench", *command]
    elif not command:
        parser.error("expected a command to run in the machine")
    # Ends the machines on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(
            command,
            machines=2 if arguments.machines == "two" else 1,
            seconds=arguments.seconds,
            show=lambda line: print(line, flush=True),
        )
    except CannotBootError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except JobFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
