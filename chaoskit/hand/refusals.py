"""Refusals of a request: bad input, and acts that the kernel or the tools do not allow.

-> ``hand/server.py`` makes them the answer to a request.
"""

from __future__ import annotations


class RefusedRequest(Exception):
    """A request with bad input; it has changed nothing.

    Args:
        field: the field that is wrong.
        value: the value of the field; None if the field is missing.
        remedy: the correction, as an imperative sentence.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}={value!r}: {remedy}")


class Unable(Exception):
    """An act that was tried, and that the kernel or a tool has refused.

    Args:
        reason: the refusal, in one line.
        remedy: the change that would make the act possible, as an imperative sentence.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason}; {remedy}")


class ProcessGone(RefusedRequest):
    """A request for a process that has ended, or whose pid is another process by now."""

    def __init__(self, pid: int, ticks: int) -> None:
        super().__init__(
            "ticks",
            ticks,
            f"list the processes again: process {pid} did not start then, or is gone",
        )
