"""What has an end: a base for all that is closed when its `with` block is left, error or not."""

import os
from abc import ABC, abstractmethod
from typing import Self


class Resource(ABC):
    """Something to be closed, by hand or by a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Descriptor(Resource):
    """Owns the file descriptor `fd`; -1 once closed."""

    fd: int

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
