"""The tests of one part of a night, each with all of its repeats, in a pytest that stays warm between them."""

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
    """Runs tests, and starts pytest again where one has ended it.

    Args:
        arguments: of pytest, which name the tests. directory: of the user, below ``root``. folder: of the night.
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
        self._below = directory.resolve().relative_to(root)
        report = [f"--chaos-report={folder / 'report'}"]
        substrate = [f"--chaos-substrate={plan.substrate}"] if plan.substrate else []
        self._arguments = [*arguments, *report, *substrate]
        self._arm: ArmProcess | None = None

    def names(self) -> list[str]:
        """Names of the tests. Raises HarnessError if there are none, or they cannot be collected."""
        found = self._running().tests
        if not found:
            raise HarnessError(
                f"{self._part}: no test uses the fixture chaos: {' '.join(self._arguments)}"
            )
        return found

    def run(self, test: str) -> tuple[NightUnit, list[HistoryRecord]]:
        """Run a test as often as planned: what came of it, and its records for a history."""
        reports: list[ArmReport] = []
        began, why_not = time.monotonic(), ""
        while len(reports) < self._plan.repeats and not why_not:
            try:
                reports.append(self._running().run(test))
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
            why_not = troubles[0] if troubles else "it passed, and made no run"
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

    def _running(self) -> ArmProcess:
        if self._arm is not None:
            return self._arm
        count = len([*self._folder.glob(f"pytest-{self._part}-*")])
        self._arm = ArmProcess(
            Version(self._part, "", sys.executable),
            self._root,
            self._arguments,
            root=self._root,
            below=self._below,
            scratch=self._folder / f"pytest-{self._part}-{count}",
        )
        self._arm.await_tests()
        return self._arm

    def close(self) -> None:
        """End pytest, and all that it has started."""
        if self._arm is not None:
            self._arm.close()
            self._arm = None
