"""Settings of every test process, made before torch is imported anywhere."""

import os

# The tensors here are tiny. A second OpenMP thread makes them ten times slower when the cores are
# busy, for it spins while it waits. Processes that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
