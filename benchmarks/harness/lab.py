"""Experiments for the benchmarks: a warm supervisor, one job, and messages on progress."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness.bars import intervals
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.run.run import RawRun, Watch, execute
from chaoskit.journal import Record, read_journals
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate import registry
from chaoskit.vocabulary import Event
from faults import Fault

#: Steps that are not looked at: memory and caches are still being warmed.
WARM_UP = 5


def show_progress(text: str) -> None:
    """Print progress to standard error, so that standard output has only results."""
    print(text, file=sys.stderr, flush=True)


class Lab:
    """Experiments with the reference job on four ranks.

    Args:
        smoke: True to use the tiny job with the fewest repeats that show that everything works.
        directory: the directory of the journals; None to delete them when the lab is closed.
        substrate: the name of the substrate of the nodes.
    """

    def __init__(
        self, *, smoke: bool, directory: Path | None = None, substrate: str = registry.LOCAL
    ) -> None:
        self.smoke = smoke
        self.size = "tiny" if smoke else "10m"
        self.directory = directory
        self._substrate = registry.make(substrate)
        self._harness = Harness(self._substrate, directory)

    def __enter__(self) -> Lab:
        self._substrate.warm_up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._harness.close()
        self._substrate.close()

    def repeats(self, count: int) -> int:
        """Return ``count``, or 1 in a smoke run."""
        return 1 if self.smoke else count

    def run(
        self,
        *faults: Fault,
        steps: int,
        job: str = "gpt",
        size: str = "",
        options: dict[str, Any] | None = None,
        twin: bool = False,
        **settings: Any,
    ) -> Outcome:
        """Run an experiment and return its outcome.

        Its journals stay at least until the lab is closed. ``options``: those of a job without
        sizes.
        """
        name = ", ".join(map(str, faults)) or "unbroken"
        begin_s = time.monotonic()
        given = {"size": size or self.size} if options is None else options
        outcome = self._harness.run(
            job, faults=faults, twin=twin, steps=steps, options=given, **settings
        )
        show_progress(
            f"    {name}: {outcome.verdict.value} in {time.monotonic() - begin_s:.1f} s {'; '.join(outcome.reasons)}"
        )
        return outcome

    @property
    def scratch(self) -> Path:
        """Return a directory that is deleted together with the journals."""
        return self._harness.directory

    def watch(
        self,
        watch: Watch,
        *,
        steps: int,
        job: str = "gpt",
        size: str = "",
        options: dict[str, Any] | None = None,
        twin: bool = True,
        **settings: Any,
    ) -> tuple[RawRun, Outcome]:
        """Run the job while ``watch`` gets each message; return the run and its judged outcome.

        ``options``: see :meth:`run`.
        """
        given = {"size": size} if options is None else options
        experiment = plan_experiment(job, steps=steps, options=given, **settings)
        reference = self._harness.twin(experiment) if twin else None
        number = next(
            n for n in itertools.count(1) if not (self._harness.directory / f"watched-{n}").exists()
        )
        directory = self._harness.directory / f"watched-{number}"
        run = execute(experiment, self._substrate, directory, watch=watch)
        return run, judge(run, reference, self._substrate.name)


def records(outcome: Outcome) -> list[Record]:
    """Return the records of all journals of a run."""
    return read_journals(Path(outcome.directory) / "journal")


def step_seconds(outcome: Outcome) -> list[float]:
    """Return the seconds between commits of rank 0 in an unbroken run, once the run is warm and its
    spares are ready.
    """
    journal = records(outcome)
    settled_ns = max(
        (record.t_ns for record in journal if record.event == Event.SPARE_READY), default=0
    )
    commits = [
        record.t_ns for record in journal if record.event == Event.COMMIT and record["rank"] == 0
    ]
    warm = [t_ns for t_ns in commits[WARM_UP:] if t_ns > settled_ns]
    return intervals(warm, 0) or intervals(commits, 0)
