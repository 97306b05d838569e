"""The replaceable parts of a simulated history: a planted mistake replaces one, and the product stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership.limits import LIMITS, Limits
from chaoskit.coordinator.membership.policies import POLICIES, Policies
from chaoskit.coordinator.outputs import Output
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.daemon.copy_budget import CopyBudget
from chaoskit.journal import Record
from chaoskit.runlog.torn import TornWorld, torn_worlds
from chaoskit.wire.announcements import Facts


def _as_said(plane: ControlPlane, message: Any) -> Iterable[Any]:
    return [message]


def _as_decided(what: str, outputs: list[Output]) -> list[Output]:
    return outputs


def _as_set(config: RunConfig) -> RunConfig:
    return config


def _by_budget() -> CopyBudget:
    return CopyBudget(every_step=False)


@dataclass(frozen=True, kw_only=True)
class Seams:
    """The replaceable parts of a history; the defaults are those of the product.

    Attributes:
        hears: what a plane is told in place of a message; of a hello, one or :class:`~chaoskit.errors.Refused`.
        does: what a coordinator does in place of what its plane decided when its method of this name was called.
        coordinator: the settings by which coordinators go, from those of the run.
        node: the settings by which agents go.
        policies: what a plane decides by.
        limits: how long it waits for others.
        facts: makes the memory that an agent has of its workers.
    budget: makes what decides which commits of a node are copied.
    torn_worlds: what the judge takes for worlds that ended in one update.
    """

    hears: Callable[[ControlPlane, Any], Iterable[Any]] = _as_said
    does: Callable[[str, list[Output]], list[Output]] = _as_decided
    coordinator: Callable[[RunConfig], RunConfig] = _as_set
    node: Callable[[RunConfig], RunConfig] = _as_set
    policies: Policies = POLICIES
    limits: Limits = LIMITS
    facts: Callable[[], Facts] = Facts
    budget: Callable[[], CopyBudget] = _by_budget
    torn_worlds: Callable[[Sequence[Record]], list[TornWorld]] = torn_worlds


#: The parts of a history without a mistake.
SOUND = Seams()
