"""The tests of one part of a night, each with all of its repeats, in a pytest that stays warm between them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.history.record import HistoryRecord, NightUnit, RunRecord, new_id
from chaoskit.nightly.outcome import verdicts_of
from chaoskit.nightly.plan import NightPlan
from chaoskit.versions.arm import ArmProcess, Version

Part = Literal["control", "experiments"]


class NightTests:
    """Runs tests, and starts pytest again where one has ended it.

    Args:
        arguments: of pytest, which name the tests. directory: of the user, below ``root``. folder: of the night.
    """

    def __init__(
        self, part: Part, arguments: Sequence[str], plan: NightPlan, directory: Path, root: Path, folder: Path
    ) -> None:
        self._part, self._plan, self._folder, self._root = part, plan, folder, root
        self._below = directory.resolve().relative_to(root)
        report = [f"--chaos-report={folder / 'report'}"]
        substrate = [f"--chaos-substrate={plan.substrate}"] if plan.substrate else []
        self._arguments = [*arguments, *report, *substrate]
        self._arm: ArmProcess | None = None

    def tests(self) -> list[str]:
        """Names of the tests. Raises HarnessError if there are none, or they cannot be collected."""
        found = self._running().tests
        if not found:
            raise HarnessError(f"{self._part}: no test uses the fixture chaos: {' '.join(self._arguments)}")
        return found

    def run(self, test: str) -> tuple[NightUnit, list[HistoryRecord]]:
        """Run a test as often as planned: what came of it, and its records for a history."""
        runs: list[RunRecord] = []
        plans: dict[str, HistoryRecord] = {}
        troubles: Counter[str] = Counter()
        began = time.monotonic()
        for _ in range(self._plan.repeats):
            try:
                report = self._running().run(test)
            except HarnessError as error:
                troubles[str(error)] += 1
                self.close()
                break
            runs += report.runs
            plans |= {plan.series: plan for plan in report.plans}
            if report.trouble:
                troubles[report.trouble] += 1
        session = new_id()
        unit = NightUnit(
            part=self._part,
            test=test,
            runs=len(runs),
            verdicts=verdicts_of(runs),
            troubles=list(troubles),
            seconds=round(time.monotonic() - began, 2),
            why_not="" if runs else next(iter(troubles), "it passed, and made no run"),
        )
        return unit, [*plans.values(), *(msgspec.structs.replace(run, session=session) for run in runs)]

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
