"""What has an end: a base for all that is closed when its `with` block is left, error or not."""

from __future__ import annotations

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
