"""The right to write into another process's memory, which its owner can take back for certain.

    owner                                   writer
    Lease(grant): a file with the grant --> HeldLease(path): opened anew, so its lock is its own
                                            each batch: LOCK_SH, not empty? copy, unlock
    revoke(): the file is empty             next batch: empty, so nothing is copied any more
    is_free(): LOCK_EX obtained?            (a batch under way holds LOCK_SH; death unlocks it)

After `is_free()` nothing lands any more: whoever locks later sees it empty. Nobody ever waits in a
lock: both sides only try. `flock` belongs to the open file, not to the process, which is why the
writer must not lock through a copy of the owner's descriptor, and why children must not inherit it
(it is close-on-exec; fork without exec while copying would keep the lock alive).
"""

import fcntl
import os
import stat

from disagg.resource import Descriptor

MAX_GRANT_BYTES = 64 << 10


class Lease(Descriptor):
    """The owner's side: one per connection and direction. `grant`, not empty, is for whoever opens
    the file."""

    def __init__(self, grant: bytes) -> None:
        self.fd = os.memfd_create("disagg-lease", os.MFD_CLOEXEC)
        os.pwrite(self.fd, grant, 0)

    def revoke(self) -> None:
        """No batch starts after this; one may still be under way, see `is_free`."""
        os.ftruncate(self.fd, 0)

    def is_free(self) -> bool:
        """After `revoke`: whether nothing can land any more. Once true, stays true."""
        return _try_lock(self.fd, fcntl.LOCK_EX)


class OpenFile(Descriptor):
    """A regular file at a path. OSError; ValueError for something else, which is not opened."""

    def __init__(self, path: str, how: int = os.O_RDONLY) -> None:
        # The path may name something else at any time: what is looked at is what is opened.
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise ValueError(f"{path}: expected a regular file, got something else")
            self.fd = os.open(f"/proc/self/fd/{found}", how | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(found)


class HeldLease(OpenFile):
    """The writer's side: the owner's file, by a path to it."""

    def read_grant(self) -> bytes:
        """What the owner wrote into it. OSError."""
        # Fails for all but memory: reading other regular files (of procfs) may never return.
        fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
        return os.pread(self.fd, MAX_GRANT_BYTES, 0)

    def begin(self) -> bool:
        """Lock for one batch; False if the lease is revoked (or about to be). Then no `end`."""
        if _try_lock(self.fd, fcntl.LOCK_SH):
            if os.pread(self.fd, 1, 0):
                return True
            self.end()
        return False

    def end(self) -> None:
        """Unlock, as `close` does. Every byte of the batch is visible before this returns."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
