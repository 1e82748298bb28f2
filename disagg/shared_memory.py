"""Memory that another process can map by file descriptor: anonymous, so nothing outlives a kill."""

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from disagg.resource import Descriptor


class SharedMemory(Descriptor):
    """`nbytes` of zeroed memory behind a memfd, or a mapping of a descriptor that a peer passed.

    `fd` is owned and closed by `close()`. `bytes` is a view of the mapping: uint8 `[nbytes]`. The
    mapping itself lives until the last view (numpy or torch) is gone.
    """

    def __init__(self, nbytes: int, *, fd: int | None = None, name: str = "disagg") -> None:
        if nbytes < 1:
            raise ValueError(f"shared memory needs at least 1 byte, got {nbytes}")
        self.nbytes = nbytes
        if fd is None:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            # A mapping of a file that shrank later ends its process with SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.fd = fd
        try:
            self.buffer = mmap.mmap(fd, nbytes)
        except (OSError, ValueError, OverflowError):
            self.close()
            raise
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.buffer, dtype=np.uint8)

    def __getstate__(self) -> tuple[int, int]:
        """Pickled for a child process that inherits the descriptor, it is the same memory there."""
        return self.nbytes, self.fd

    def __setstate__(self, state: tuple[int, int]) -> None:
        nbytes, fd = state
        SharedMemory.__init__(self, nbytes, fd=fd)

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(self.bytes.ctypes.data)
