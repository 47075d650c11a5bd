"""How preparing or applying work on memory went."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """How preparing or applying a context went."""

    SUCCESS = "success"
    NO_UPDATE = "no update"
    FAILED_PREPARE = "failed prepare"
    FAILED_COMPUTE = "failed compute"

    @property
    def is_fail(self) -> bool:
        """Whether the context cannot be used."""
        return self in (Status.FAILED_PREPARE, Status.FAILED_COMPUTE)


def status_combine(a: Status, b: Status) -> Status:
    """The status of two parts together: the first failure, else whether either has work."""
    for status in (a, b):
        if status.is_fail:
            return status
    return a if a is Status.SUCCESS else b
