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
        hears: returns the messages that a plane receives in place of a message; for a hello, one
            message, or it raises :class:`~chaoskit.errors.Refused`.
        does: returns the outputs that a coordinator carries out in place of those that the plane's
            method of this name decided.
        coordinator: returns the settings of coordinators, from those of the run.
        node: returns the settings of agents, from those of the run.
        policies: the policies of a plane.
        limits: the time limits of a plane.
        facts: returns a new memory of an agent for its workers.
        budget: returns a new budget, which decides what commits of a node are copied.
        torn_worlds: returns the worlds that ended in one update, as the judge sees it.
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
