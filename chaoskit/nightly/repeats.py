"""Tests of one part of a night with all of their repeats, in a pytest that stays warm.

-> versions/arm.py: the pytest process. nightly/run.py: the order of the parts, and the end of the
night after a failure of the control.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.history.record import HistoryRecord, NightUnit, new_id
from chaoskit.nightly.outcome import verdicts_of
from chaoskit.nightly.plan import NightPlan
from chaoskit.plaintext import plural
from chaoskit.versions.arm import ArmProcess, Version
from chaoskit.versions.schedule import ArmReport

Part = Literal["control", "experiments"]


class NightTests:
    """The tests of one part of a night. Pytest is restarted if a test has ended it.

    Args:
        part: the part of the night.
        arguments: arguments of pytest, which name the tests.
        directory: the user's directory, below ``root``.
        folder: the folder of the night.
    """

    def __init__(
        self,
        part: Part,
        arguments: Sequence[str],
        plan: NightPlan,
        directory: Path,
        root: Path,
        folder: Path,
    ) -> None:
        self._part, self._plan, self._folder, self._root = part, plan, folder, root
        self._subdirectory = directory.resolve().relative_to(root)
        report = [f"--chaos-report={folder / 'report'}"]
        substrate = [f"--chaos-substrate={plan.substrate}"] if plan.substrate else []
        self._arguments = [*arguments, *report, *substrate]
        self._arm: ArmProcess | None = None

    def names(self) -> list[str]:
        """Return the names of the tests.

        Raise HarnessError if there are none, or they cannot be collected.
        """
        names = self._running_arm().tests
        if not names:
            raise HarnessError(
                f"{self._part}: no test uses the fixture chaos: {' '.join(self._arguments)}"
            )
        return names

    def run(self, test: str) -> tuple[NightUnit, list[HistoryRecord]]:
        """Run a test as often as planned. Return its result, and its records for a history.

        The remaining runs are left out if pytest ends or does not answer. ``why_not`` of the result
        has the reason then, and also if no run was made.
        """
        reports: list[ArmReport] = []
        began, why_not = time.monotonic(), ""
        while len(reports) < self._plan.repeats and not why_not:
            try:
                reports.append(self._running_arm().run(test))
            except HarnessError as error:
                why_not = f"{len(reports)} of {plural(self._plan.repeats, 'run')}: {error}"
                self.close()
        session = new_id()
        runs = [
            msgspec.structs.replace(run, session=session)
            for report in reports
            for run in report.runs
        ]
        plans = {plan.series: plan for report in reports for plan in report.plans}
        troubles = list(dict.fromkeys(report.trouble for report in reports if report.trouble))
        if not runs and not why_not:
            why_not = troubles[0] if troubles else "the test passed without making a run"
        unit = NightUnit(
            part=self._part,
            test=test,
            runs=len(runs),
            verdicts=verdicts_of(runs),
            failures=sum(report.has_own_failure() for report in reports),
            troubles=troubles,
            session=session,
            seconds=round(time.monotonic() - began, 2),
            why_not=why_not,
        )
        return unit, [*plans.values(), *runs]

    def _running_arm(self) -> ArmProcess:
        """Return the running pytest, which is started if necessary.

        Raise HarnessError if it cannot be started or cannot collect its tests.
        """
        if self._arm is not None:
            return self._arm
        count = len([*self._folder.glob(f"pytest-{self._part}-*")])
        self._arm = ArmProcess(
            Version(self._part, "", sys.executable),
            self._root,
            self._arguments,
            root=self._root,
            subdirectory=self._subdirectory,
            scratch=self._folder / f"pytest-{self._part}-{count}",
        )
        self._arm.await_tests()
        return self._arm

    def close(self) -> None:
        """End pytest and its children, if it runs."""
        if self._arm is not None:
            self._arm.close()
            self._arm = None
