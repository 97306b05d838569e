"""The one entry point: run a job, break it, judge it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaoskit.config import require_writable
from chaoskit.errors import BadInput
from chaoskit.experiment.conductor import Watch
from chaoskit.experiment.judge import judge
from chaoskit.experiment.outcome import Outcome
from chaoskit.experiment.plan import Experiment, plan_experiment
from chaoskit.experiment.planfile import FILE_NAME, save
from chaoskit.experiment.run import RawRun, execute
from chaoskit.experiment.twin import Twin, TwinCache
from chaoskit.substrate.base import Substrate
from chaoskit.substrate.undo import UndoLog
from faults.base import Fault


class Harness:
    """Runs experiments one after the other on one substrate. Each run's directory holds its plan.

    Args:
        directory: where runs leave journals and logs; a temporary one, removed at the end, where none is given.

    Raises:
        BadInput: if ``directory`` cannot be written.
    """

    def __init__(self, substrate: Substrate, directory: Path | None = None, twins: TwinCache | None = None) -> None:
        self._substrate = substrate
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="chaoskit-"))
        require_writable("report directory", self.directory)
        self._undo = UndoLog()
        self._twins = twins or TwinCache()
        self._numbers = itertools.count(1)

    def run(
        self, job: str, *, faults: Sequence[Fault] = (), twin: bool = True, watch: Watch | None = None, **plan: Any
    ) -> Outcome:
        """Run ``job`` with ``faults`` and say what happened.

        Args:
            job: a reference job, a file, or ``file.py:function``.
            twin: compare with the unbroken run, which is run first unless it is known.
            watch: is shown every message of the coordinator, for live views.
            plan: see :func:`chaoskit.experiment.plan.plan_experiment`.

        Raises:
            BadInput: before anything is started, or when the job refuses its input. HarnessError: chaoskit failed.
        """
        experiment = plan_experiment(job, faults=faults, **plan)
        return self.run_planned(experiment, twin=twin, watch=watch)

    def run_planned(
        self,
        experiment: Experiment,
        *,
        twin: bool = True,
        watch: Watch | None = None,
        watch_twin: Watch | None = None,
        port: int = 0,
    ) -> Outcome:
        """Run what :func:`plan_experiment` made. ``watch_twin`` sees the unbroken run, where one is needed."""
        reference = self.twin(experiment, watch_twin) if twin else None
        run = self._execute(experiment, watch, port)
        return judge(run, reference, self._substrate.name)

    def twin(self, experiment: Experiment, watch: Watch | None = None) -> Twin:
        """What the experiment would have done unbroken; run now if that is not known yet."""
        found = self._twins.get(experiment)
        if found is None:
            found = Twin.of(self._execute(experiment.unbroken(), watch, 0))
            self._twins.put(experiment, found)
        return found

    def _execute(self, experiment: Experiment, watch: Watch | None, port: int) -> RawRun:
        name = "".join(letter if letter.isalnum() else "-" for letter in experiment.name)
        free = (f"{number:03d}" for number in self._numbers if not any(self.directory.glob(f"{number:03d}-*")))
        directory = self.directory / f"{next(free)}-{name[:60]}"  # journals are appended to: never a used one
        with contextlib.suppress(BadInput):  # a fault of the user's own whose fields have no JSON form
            save(experiment, directory / FILE_NAME)
        return execute(
            experiment, self._substrate, self._undo, directory, watch=watch or (lambda message: None), port=port
        )

    def close(self) -> None:
        """Forget what is not wanted any more. The substrate is closed by whoever made it."""
        self._undo.close()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
