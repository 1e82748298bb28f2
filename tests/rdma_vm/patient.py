"""A launch script, with patience for a peer on an emulated machine whose host is busy.

    python -m tests.rdma_vm.patient run_decode.py FLAGS

run_decode.py --flags--> how long a peer may be silent, and a prefill may take
patient       ---------> how long an opening, an answer to --check and a NIC's answer may take
"""

import runpy
import sys

from disagg.serve import check
from disagg.transfer import control, verbs_device

SECONDS = 120.0
#: As a queue pair's number of tries, for soft-RoCE.
FOR_EVER = 7


def main() -> None:
    """Run the script that the first argument names, with the others."""
    check.PATIENCE = SECONDS
    control.OPENING_TIMEOUT_SECONDS = SECONDS
    verbs_device._RETRIES = FOR_EVER
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
