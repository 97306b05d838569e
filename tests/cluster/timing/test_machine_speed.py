"""Durations of examinations of a machine that does nothing else."""

from __future__ import annotations

import time
from pathlib import Path

from chaoskit.cli.machine import doctor
from chaoskit.health import HealthLimits
from chaoskit.health.examine import examine_quickly


def test_the_doctor_is_quick() -> None:
    """An examination by the doctor takes less than two seconds of CPU time."""
    doctor.examine()
    used_s = time.process_time()
    doctor.examine()
    assert time.process_time() - used_s < 2.0


def test_the_look_of_an_agent_is_quick(tmp_path: Path) -> None:
    """An agent examines its node within a fraction of the time in which a job starts."""
    began_s = time.monotonic()
    assert examine_quickly("node0", tmp_path, HealthLimits())
    assert time.monotonic() - began_s < 5.0
