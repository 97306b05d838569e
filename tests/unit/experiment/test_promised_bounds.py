"""Constants of the runtime, held to the promised bounds: a constant that grows fails here, and
moves no bound of the judge.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import chaoskit.experiment
from chaoskit.coordinator.detectors import join_timeout, phase_limits
from chaoskit.coordinator.handlers import on_node
from chaoskit.coordinator.membership import failure_budget, strikes
from chaoskit.coordinator.membership.limits import LIMITS
from chaoskit.experiment.properties import promised

BOUNDS = {
    "a new membership is followed": (join_timeout.FOLLOW_S, promised.FOLLOW_S),
    "agents come again": (on_node.REATTACH_S, promised.REATTACH_S),
    "a slow agent": (LIMITS.slow_agent_s, promised.SLOW_AGENT_S),
    "healing": (LIMITS.healing_s, promised.HEALING_S),
    "offers of copies": (LIMITS.recall_s, promised.RECALL_S),
    "the next worker": (LIMITS.gather_s, promised.GATHER_S),
    "the first pause": (failure_budget.PAUSE_S, promised.PAUSE_S),
    "the longest pause": (failure_budget.PAUSE_MAX_S, promised.PAUSE_MAX_S),
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
    """Bounds of properties are numbers of their own; otherwise 600 s would pass as well as 2."""
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
        "chaoskit.process.progress_board",
        "chaoskit.runtime",
        "chaoskit.wire.announcements",
        "chaoskit.wire.lease",
    )
    assert not [module for module in imported if module.startswith(judged)]
