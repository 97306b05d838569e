"""Limits of detection: choices of the ini value ``chaos_detection`` and of the marker, and the
limits of twins.
"""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.config import DETECTION, RunConfig
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.pytest_plugin import Chaos

QUICK: dict[str, Any] = {
    "nodes": 1,
    "spares": 0,
    "steps": 2,
    "options": {"size": "tiny"},
    "twin": False,
}


def limits_of(chaos: Chaos, **settings: Any) -> dict[str, Any]:
    """Return the limits of a run that differ from those of production."""
    all_settings = chaos.run("gpt", **QUICK | settings).settings
    return {name: all_settings[name] for name in DETECTION["relaxed"] if name in all_settings}


def test_tests_of_this_repository_have_relaxed_limits(chaos: Chaos) -> None:
    """The ini value reaches the run, and a limit that the test names wins."""
    assert limits_of(chaos) == DETECTION["relaxed"]
    assert limits_of(chaos, heartbeat_ms=70)["heartbeat_ms"] == 70


@pytest.mark.chaos(detection="production")
def test_the_marker_overrides_the_ini_value(chaos: Chaos) -> None:
    """``detection="production"`` restores the defaults of :class:`RunConfig`."""
    assert limits_of(chaos) == {}


SUITE = """
def test_defaults(chaos):
    outcome = chaos.run("gpt", nodes=1, spares=0, steps=2, options={"size": "tiny"}, twin=False)
    assert not {"heartbeat_ms", "lease_beats", "hang_floor_ms", "startup_s"} & set(outcome.settings)
"""


@pytest.mark.costly
def test_a_suite_without_the_ini_value_has_production_limits(pytester: pytest.Pytester) -> None:
    """A plain install has the production defaults."""
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_an_unknown_value_is_refused(pytester: pytest.Pytester) -> None:
    """The session refuses an unknown value before any test, and names the allowed values."""
    pytester.makeini("[pytest]\nchaos_detection = slow\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stderr.fnmatch_lines(["*chaos_detection='slow': use one of production, relaxed*"])


def test_a_twin_has_limits_of_minutes() -> None:
    """A reference run on a busy machine is not broken by detection: lease, hang and start limits are minutes."""
    config = plan_experiment("gpt", steps=2, nodes=2, slow_limit=3.0).unbroken().config
    assert config.heartbeat_ms * config.lease_beats >= 120_000
    assert config.hang_floor_ms >= 120_000
    assert config.startup_s >= 240
    assert config.slow_limit == 0
    assert config.heartbeat_ms == RunConfig(job=config.job).heartbeat_ms, (
        "copies are made once a beat, as in the run"
    )
