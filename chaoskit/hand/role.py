"""The interface of a role: its operations, and the effects that it begins.

-> ``hand/processes/operations.py`` and ``hand/network/operations.py`` are the two roles;
``hand/server.py`` runs one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .effects import LastingEffect
from .fields import HandOperation


class EffectKeeper(Protocol):
    """The part of the server that keeps effects, as a role sees it."""

    def begin(self, number: int, effect: LastingEffect, lasts_s: float) -> None:
        """Keep an effect that has begun, under the number of its request, for so many seconds."""

    def begin_failed(self, number: int, effect: LastingEffect) -> None:
        """Keep an effect whose begin has failed halfway, and end it after the answer."""

    def number_on(self, pid: int) -> int | None:
        """Return the number of the effect on a process; None if there is none."""

    def end_effect(self, number: int, reason: str) -> dict[str, Any]:
        """End an effect, send the event, and return the evidence.

        Raises:
            Unable: if the end has failed. The effect is kept, and its end is tried again.
        """

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Send an event."""


class Role(Protocol):
    """Operations of a hand. The server adds those that all hands have."""

    name: str
    operations: Mapping[str, HandOperation]

    def hello(self) -> dict[str, Any]:
        """Return facts of the role for the answer to ``hello``."""

    def collect(self) -> None:
        """Take in what the kernel has reported."""
