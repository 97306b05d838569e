"""The runtime is held to what is promised: a constant that grows fails here, and moves no bound of the judge."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import chaoskit.experiment
from chaoskit.coordinator import nodes
from chaoskit.coordinator.detectors import muster, phase_limits
from chaoskit.coordinator.membership import staffing, strikes
from chaoskit.coordinator.membership.limits import LIMITS
from chaoskit.experiment.properties import promised

BOUNDS = {
    "a new membership is followed": (muster.FOLLOW_S, promised.FOLLOW_S),
    "agents come again": (nodes.REATTACH_S, promised.REATTACH_S),
    "a slow agent": (LIMITS.slow_agent_s, promised.SLOW_AGENT_S),
    "healing": (LIMITS.healing_s, promised.HEALING_S),
    "offers of copies": (LIMITS.recall_s, promised.RECALL_S),
    "the next worker": (LIMITS.gather_s, promised.GATHER_S),
    "the first pause": (staffing.PAUSE_S, promised.PAUSE_S),
    "the longest pause": (staffing.PAUSE_MAX_S, promised.PAUSE_MAX_S),
    "young steps": (phase_limits.YOUNG_STEPS, promised.YOUNG_STEPS),
    "first steps": (phase_limits.FIRST_STEP_ALLOWANCES, promised.FIRST_STEP_ALLOWANCES),
    "steps until a limit is known": (phase_limits.KNOWN_STEPS, promised.KNOWN_STEPS),
}


@pytest.mark.parametrize(("actual", "most"), BOUNDS.values(), ids=BOUNDS)
def test_the_runtime_waits_no_longer_than_is_promised(actual: float, most: float) -> None:
    assert actual <= most


def test_losses_are_counted_together_for_as_long_as_is_promised() -> None:
    """A shorter window would forgive a node too early."""
    assert strikes.STRIKE_WINDOW_S >= promised.STRIKE_WINDOW_S


def test_no_property_takes_a_bound_from_the_code_that_it_judges() -> None:
    """Else 600 s would pass as well as 2."""
    folder = Path(chaoskit.experiment.__file__).parent / "properties"
    imported = {
        node.module or ""
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    judged = (
        "chaoskit.agent",
        "chaoskit.checkpoint",
        "chaoskit.coordinator",
        "chaoskit.daemon",
        "chaoskit.logs",
        "chaoskit.process.heartbeat_page",
        "chaoskit.runtime",
        "chaoskit.wire.announcements",
        "chaoskit.wire.lease",
    )
    assert not [module for module in imported if module.startswith(judged)]
