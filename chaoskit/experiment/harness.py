"""The one entry point: run a job, break it, judge it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from chaoskit.errors import BadInput, FaultBroken
from chaoskit.experiment.directory import keep
from chaoskit.experiment.injection.follow import Watch
from chaoskit.experiment.judge.command_judge import judge_command
from chaoskit.experiment.judge.comparison import exactness
from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.command_plan import CommandExperiment, plan_command
from chaoskit.experiment.plan.plan import Experiment, plan_experiment, require_divisible
from chaoskit.experiment.plan.planfile import FILE_NAME, Planned, save
from chaoskit.experiment.reference.floor import Floor, floor_of
from chaoskit.experiment.reference.reference import reference_of
from chaoskit.experiment.remote.host import ExperimentHost, LocalHost, demand_of, make_host
from chaoskit.experiment.run.command_run import CommandRun, load_command_run
from chaoskit.experiment.run.run import LATER, RawRun, load_run
from chaoskit.experiment.twin.command_twin import CommandTwin, CommandTwins
from chaoskit.experiment.twin.twin import Interrupted, Twin, TwinCache, UnbrokenFailed
from chaoskit.faults.base import Fault
from chaoskit.process.host_checks import require_file_size, require_writable
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.substrate import registry
from chaoskit.substrate.core.base import Substrate
from chaoskit.substrate.undo import Undo, UndoLog, temporary_directory
from chaoskit.typed import convert, named_path, typed_arguments

Ran = TypeVar("Ran")


class Harness:
    """Runs experiments one after the other on one host. Each run's directory holds its plan.

    Args:
        substrate: where nodes come from, by name (``local``, ``netns``, ``docker``), or one that was made before; or a
            host of experiments that has one.
        directory: where runs leave journals and logs; a temporary one, removed at the end, where none is given.

    Raises:
        BadInput: if ``directory`` cannot be written, or this machine has no such substrate.
    """

    @typed_arguments
    def __init__(
        self,
        substrate: Substrate | ExperimentHost | str = registry.LOCAL,
        directory: str | Path | None = None,
        twins: TwinCache | None = None,
    ) -> None:
        self._makes_substrate = isinstance(substrate, str)
        made = make_host(substrate) if isinstance(substrate, str) else substrate
        self.host = made if isinstance(made, ExperimentHost) else LocalHost(made)
        self._temporary: Undo | None = None
        require_file_size()
        if directory is None:
            self.directory, self._temporary = temporary_directory("runs", self.host.undo)
        else:
            self.directory = named_path("report directory", directory)
            require_writable("report directory", self.directory)
            self.directory.mkdir(parents=True, exist_ok=True)
        self._twins = twins or self.host.twins
        self._command_twins = CommandTwins(self.directory)
        self._numbers = itertools.count(1)

    def run(
        self,
        job: str | None = None,
        *,
        command: Sequence[str] | None = None,
        faults: Sequence[Fault] = (),
        twin: bool = True,
        watch: Watch | LogPatterns | None = None,
        **plan: Any,
    ) -> Outcome:
        """Run ``job``, or ``command``, with ``faults`` and say what happened.

        Args:
            job: a reference job, a file, or ``file.py:function``.
            command: any command instead, such as ``["torchrun", "train.py"]``.
            twin: compare with the unbroken run, which is run first unless it is known.
            watch: of a job, is shown every message of the coordinator, for live views. Of a command, how its log shows
                steps and losses.
            plan: see :func:`chaoskit.experiment.plan.plan.plan_experiment`; of a command,
                :func:`chaoskit.experiment.plan.command_plan.plan_command`.

        Raises:
            BadInput: before anything is started, or when the job refuses its input. HarnessError: chaoskit failed.
        """
        job, twin = convert("job", job, str | None), convert("twin", twin, bool)
        if command is not None:
            if job is not None:
                raise BadInput("job", job, "give a job or a command, not both")
            return self.run_planned(
                plan_command(command, watch=watch, faults=faults, **plan), twin=twin
            )
        if job is None:
            raise BadInput("job", job, "give a job such as 'gpt', or command=[...]")
        if isinstance(watch, LogPatterns):
            raise BadInput(
                "watch", watch, "use LogPatterns with command=[...]: a job tells its steps itself"
            )
        seen: Watch | None = convert("watch", watch, Watch | None)
        return self.run_planned(plan_experiment(job, faults=faults, **plan), twin=twin, watch=seen)

    @typed_arguments
    def run_planned(
        self,
        experiment: Planned,
        *,
        twin: bool = True,
        watch: Watch | None = None,
        watch_twin: Watch | None = None,
        port: int = 0,
    ) -> Outcome:
        """Run what was planned. ``watch_twin`` sees the unbroken run, where one is needed.

        Raises:
            BadInput: before anything is started, also if the substrate cannot do one of the faults.
        """
        if isinstance(experiment, Experiment):
            require_divisible(experiment.config)
        self._require_able(experiment)
        self.host.reach()
        if isinstance(experiment, CommandExperiment):
            unbroken = self._command_twin(experiment, watch_twin) if twin else None
            command_run = self._execute_command(
                experiment, watch, unbroken.run_id if unbroken else ""
            )
            keep(command_run.directory, unbroken)
            return judge_command(command_run, unbroken, self.host.name)
        try:
            return self._run_job(
                experiment, twin=twin, watch=watch, watch_twin=watch_twin, port=port
            )
        except UnbrokenFailed as error:  # the job's own fault, and none of chaoskit
            return judge(error.run, None, self.host.name)

    def _run_job(
        self,
        experiment: Experiment,
        *,
        twin: bool,
        watch: Watch | None,
        watch_twin: Watch | None,
        port: int,
    ) -> Outcome:
        # such a twin depends on the sizes that the world had, or on the steps that the job took
        follows, open_ended = experiment.config.follow is not None, experiment.is_open_ended
        late = follows or open_ended
        unbroken = self._job_twin(experiment.unbroken(), watch_twin) if twin and not late else None
        twin_id = unbroken.run_id if unbroken else LATER if twin else ""
        run = self._execute(experiment, watch, port, twin_id)
        if twin and late and run.end is not None and run.end.ok:
            history = History(run.records)
            schedule, steps = (
                history.schedule() if follows else (),
                len(history.steps) if open_ended else None,
            )
            unbroken = self._job_twin(experiment.unbroken(schedule, steps), watch_twin)
        wanted = experiment.reference != "off"
        reference = (
            reference_of(experiment, History(run.records), run.directory, self.host.undo)
            if wanted
            else None
        )
        floor = _floor(run, self.host.undo) if unbroken is not None else None
        keep(run.directory, unbroken, reference, floor)
        return judge(run, unbroken, self.host.name, reference, floor)

    def _require_able(self, experiment: Planned) -> None:
        for fault in experiment.faults:
            if self.host.name in registry.NAMES and self.host.name not in fault.substrates:
                able = " or ".join(fault.substrates)
                raise BadInput(
                    "faults",
                    str(fault),
                    f"use the substrate {able}: {self.host.name} cannot do it; mark the test with "
                    f"@pytest.mark.chaos(substrate={fault.substrates[0]!r}), or give --substrate to chaoskit replay",
                )
        self.host.require(demand_of(experiment))
        for fault in experiment.faults:
            if reason := next(filter(None, map(self.host.why_not, fault.needs)), ""):
                raise BadInput("faults", str(fault), f"leave it out, or use another form: {reason}")

    @typed_arguments
    def twin(self, experiment: Planned, watch: Watch | None = None) -> Twin | CommandTwin:
        """What the experiment would have done unbroken; run now if that is not known yet.

        Raises:
            Interrupted: if a rank was lost by itself, twice in a row. HarnessError: if it did not complete.
        """
        if isinstance(experiment, CommandExperiment):
            return self._command_twin(experiment, watch)
        return self._job_twin(experiment.unbroken(), watch)

    def _command_twin(self, experiment: CommandExperiment, watch: Watch | None) -> CommandTwin:
        twin = self._command_twins.get(experiment)
        if twin is None:
            unbroken = experiment.unbroken()
            try:
                twin = CommandTwin.of(self._execute_command(unbroken, watch))
            except Interrupted:  # as in a job's twin
                twin = CommandTwin.of(self._execute_command(unbroken, watch))
            self._command_twins.put(experiment, twin)
        return twin

    def _job_twin(self, unbroken: Experiment, watch: Watch | None) -> Twin:
        with self._twins.lock(unbroken):
            found = self._twins.get(unbroken)
            if found is None:
                try:
                    found = Twin.of(self._execute(unbroken, watch, 0))
                except Interrupted:  # machines do fail by themselves; seldom twice
                    found = Twin.of(self._execute(unbroken, watch, 0))
                self._twins.put(unbroken, found)
            return found

    def _execute(
        self, experiment: Experiment, watch: Watch | None, port: int, twin_id: str = ""
    ) -> RawRun:
        directory = self._directory(experiment)
        try:
            return _outside_loops(
                lambda: self.host.execute(
                    experiment, directory, watch=watch, port=port, twin_id=twin_id
                )
            )
        except FaultBroken:
            return load_run(directory, experiment)  # its journals tell what was raised

    def _execute_command(
        self, experiment: CommandExperiment, watch: Watch | None, twin_id: str = ""
    ) -> CommandRun:
        directory = self._directory(experiment)
        with self._command_twins.noting_files(experiment):
            try:
                return _outside_loops(
                    lambda: self.host.execute_command(
                        experiment, directory, watch=watch, twin_id=twin_id
                    )
                )
            except FaultBroken:
                return load_command_run(directory, experiment)

    def _directory(self, experiment: Planned) -> Path:
        """A new directory for a run, with its plan."""
        name = "".join(letter if letter.isalnum() else "-" for letter in experiment.name)
        free = (
            f"{number:03d}"
            for number in self._numbers
            if not any(self.directory.glob(f"{number:03d}-*"))
        )
        directory = (
            self.directory / f"{next(free)}-{name[:60]}"
        )  # journals are appended to: never a used one
        with contextlib.suppress(
            BadInput
        ):  # a fault of the user's own whose fields have no JSON form
            save(experiment, directory / FILE_NAME)
        return directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what the harness made. A substrate, or a host, that was given is closed by its maker."""
        if self._temporary is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._temporary.done()
        if self._makes_substrate:
            self.host.close()


def _floor(run: RawRun, undo: UndoLog) -> Floor | None:
    """How far from its twin a run may end; None where both must be equal, or it has no end."""
    history = History(run.records)
    _, reduction = exactness(run.experiment.config, history)
    is_over = run.end is not None and run.end.ok
    return (
        floor_of(run.experiment, history, run.directory, undo)
        if is_over and reduction == "fast"
        else None
    )


def _outside_loops(run: Callable[[], Ran]) -> Ran:
    """Run an experiment in a thread of its own where this one has a running event loop, as in a notebook."""
    if not _has_running_loop():  # an error of the run must not name that there is none
        return run()
    with ThreadPoolExecutor(1, thread_name_prefix="ck-run") as pool:
        return pool.submit(run).result()


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
