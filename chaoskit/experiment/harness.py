"""Harness: run a job or a command with faults, and judge the run.

-> experiment/plan/plan.py and experiment/plan/command_plan.py: the arguments.
experiment/run/run.py: the run itself. experiment/judge/judge.py: the verdict.
experiment/twin/twin.py: which run may be a twin.
"""

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
from chaoskit.experiment.injection.job_follower import Watch
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
#: Called with a run on a running job. Returns the unbroken run of a second job; None for none.
LaterTwin = Callable[[CommandRun], CommandTwin | None]


class Harness:
    """Run experiments one after the other on one host; the directory of each run holds its plan.

    A run with a twin needs an unbroken run, too, which is made unless a cache has it. Close the
    harness after the last run.

    Args:
        substrate: the substrate that nodes come from: its name (``local``, ``netns``, ``docker``),
            an object that was made before, or a host of experiments that has one.
        directory: the directory for journals and logs of runs. Default: a temporary one, which is
            removed at the end.
        twins: the cache of unbroken runs of jobs. Default: the cache of the host.

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
        host = make_host(substrate) if isinstance(substrate, str) else substrate
        self.host = host if isinstance(host, ExperimentHost) else LocalHost(host)
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
        self._run_numbers = itertools.count(1)

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
        """Run ``job`` or ``command`` with ``faults`` and return the outcome, with its verdict.

        Exactly one of ``job`` and ``command`` is required.

        Args:
            job: a reference job, a file, or ``file.py:function``.
            command: a command that is run in place of a job, such as ``["torchrun", "train.py"]``.
                It needs ``watch``.
            faults: the faults that strike the run.
            twin: compare the run with an unbroken run of the same job or command. The unbroken run
                comes first unless it is cached. It comes afterwards if the batch follows the world,
                or the job is open-ended.
            watch: for a job, a function that receives every message of the coordinator, for live
                views. For a command, the patterns that find steps and losses in its log.
            plan: see :func:`chaoskit.experiment.plan.plan.plan_experiment`; for a command,
                :func:`chaoskit.experiment.plan.command_plan.plan_command`.

        Raises:
            BadInput: before anything is started, or when the job refuses its input.
            HarnessError, JournalFull: as for :meth:`run_planned`.
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
                "watch",
                watch,
                "use LogPatterns with command=[...] only: a job reports its steps itself",
            )
        live_view: Watch | None = convert("watch", watch, Watch | None)
        return self.run_planned(
            plan_experiment(job, faults=faults, **plan), twin=twin, watch=live_view
        )

    @typed_arguments
    def run_planned(
        self,
        experiment: Planned,
        *,
        twin: bool = True,
        watch: Watch | None = None,
        watch_twin: Watch | None = None,
        later_twin: LaterTwin | None = None,
        port: int = 0,
    ) -> Outcome:
        """Run a planned experiment and return the outcome, with its verdict.

        If the unbroken run of a job fails, that run is judged in place of the experiment. A fault
        whose code raised an error gives an outcome with the verdict error.

        Args:
            experiment: a job or a command with its faults.
            twin: compare the run with an unbroken run of the same job or command.
            watch: receives the messages of the run.
            watch_twin: receives the messages of the unbroken run, if one has to be run.
            later_twin: makes the unbroken run of a running job after the run, in place of ``twin``.
            port: the port of the coordinator; 0 for a free one. A command has none.

        Raises:
            BadInput: before anything is started, also if the substrate cannot do one of the faults;
                or when the job refuses its input.
            HarnessError: if chaoskit itself failed, or the unbroken run was disturbed.
            CommandFailed: if the unbroken run of a command did not end well.
            JournalFull: if the directory of the run has no room for the harness's journal.
        """
        if isinstance(experiment, Experiment):
            require_divisible(experiment.config)
        self._require_able(experiment)
        self.host.reach()
        if isinstance(experiment, CommandExperiment):
            unbroken = self._command_twin(experiment, watch_twin) if twin else None
            twin_id = LATER if later_twin else unbroken.run_id if unbroken else ""
            command_run = self._execute_command(experiment, watch, twin_id)
            if later_twin is not None:
                unbroken = later_twin(command_run)
            keep(command_run.directory, unbroken)
            return judge_command(command_run, unbroken, self.host.name)
        try:
            return self._run_job(
                experiment, twin=twin, watch=watch, watch_twin=watch_twin, port=port
            )
        except UnbrokenFailed as error:  # the job failed without any fault: judge that run
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
        """Run a job, and its unbroken twin if it is not cached; return the verdict on the run.

        The data that the run is compared with is written into its directory.

        Raises:
            UnbrokenFailed: if the twin failed.
        """
        # such a twin depends on the world sizes or the number of steps of the broken run
        follows_world, open_ended = experiment.config.follow is not None, experiment.is_open_ended
        runs_after = follows_world or open_ended
        unbroken = (
            self._job_twin(experiment.unbroken(), watch_twin) if twin and not runs_after else None
        )
        twin_id = unbroken.run_id if unbroken else LATER if twin else ""
        run = self._execute(experiment, watch, port, twin_id)
        if twin and runs_after and run.end is not None and run.end.ok:
            history = History(run.records)
            schedule, steps = (
                history.schedule() if follows_world else (),
                len(history.steps) if open_ended else None,
            )
            unbroken = self._job_twin(experiment.unbroken(schedule, steps), watch_twin)
        has_reference = experiment.reference != "off"
        reference = (
            reference_of(experiment, History(run.records), run.directory, self.host.undo)
            if has_reference
            else None
        )
        floor = _floor(run, self.host.undo) if unbroken is not None else None
        keep(run.directory, unbroken, reference, floor)
        return judge(run, unbroken, self.host.name, reference, floor)

    def _require_able(self, experiment: Planned) -> None:
        """Raise BadInput if the host cannot run the experiment or one of its faults.

        Raises:
            BadInput: naming the fault or the setting, and another substrate where one is able.
            HarnessError: if the host is not usable at the moment.
        """
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
        """Return the unbroken run of an experiment, which is run now if it is not cached.

        Args:
            experiment: a job or a command; its faults are left out.
            watch: receives the messages of the unbroken run.

        Raises:
            BadInput: if the job refuses its input.
            Interrupted: if the unbroken run was disturbed without a fault, twice in a row.
            UnbrokenFailed: if the job failed, or violated a safety property.
            CommandFailed: if the command did not end well.
            HarnessError: if chaoskit itself failed, or the deadline passed.
        """
        if isinstance(experiment, CommandExperiment):
            return self._command_twin(experiment, watch)
        return self._job_twin(experiment.unbroken(), watch)

    def _command_twin(self, experiment: CommandExperiment, watch: Watch | None) -> CommandTwin:
        """Return the unbroken run of a command from the cache, or run and cache it now."""
        twin = self._command_twins.get(experiment)
        if twin is None:
            unbroken = experiment.unbroken()
            try:
                twin = CommandTwin.of(self._execute_command(unbroken, watch))
            except Interrupted:  # retry once, as for the twin of a job
                twin = CommandTwin.of(self._execute_command(unbroken, watch))
            self._command_twins.put(experiment, twin)
        return twin

    def _job_twin(self, unbroken: Experiment, watch: Watch | None) -> Twin:
        """Return the unbroken run of a job from the cache, or run and cache it now."""
        with self._twins.lock(unbroken):
            twin = self._twins.get(unbroken)
            if twin is None:
                try:
                    twin = Twin.of(self._execute(unbroken, watch, 0))
                except Interrupted:  # machines fail without faults, too; seldom twice in a row
                    twin = Twin.of(self._execute(unbroken, watch, 0))
                self._twins.put(unbroken, twin)
            return twin

    def _execute(
        self, experiment: Experiment, watch: Watch | None, port: int, twin_id: str = ""
    ) -> RawRun:
        """Run a job in a new directory and return its records.

        They are also returned if a fault raised an error of its own: the journals hold the error.
        """
        directory = self._directory(experiment)
        try:
            return _outside_loops(
                lambda: self.host.execute(
                    experiment, directory, watch=watch, port=port, twin_id=twin_id
                )
            )
        except FaultBroken:
            return load_run(directory, experiment)  # the journals hold the error that was raised

    def _execute_command(
        self, experiment: CommandExperiment, watch: Watch | None, twin_id: str = ""
    ) -> CommandRun:
        """Run a command in a new directory and return its records.

        They are also returned if a fault raised an error of its own. Files that the command writes
        are recorded, since they are no inputs of its twin.
        """
        directory = self._directory(experiment)
        with self._command_twins.recording_files(experiment):
            try:
                return _outside_loops(
                    lambda: self.host.execute_command(
                        experiment, directory, watch=watch, twin_id=twin_id
                    )
                )
            except FaultBroken:
                return load_command_run(directory, experiment)

    def _directory(self, experiment: Planned) -> Path:
        """Create the directory of a new run, write its plan into it and return its path."""
        name = "".join(letter if letter.isalnum() else "-" for letter in experiment.name)
        free_numbers = (
            f"{number:03d}"
            for number in self._run_numbers
            if not any(self.directory.glob(f"{number:03d}-*"))
        )
        # journals are opened for appending: never use a directory twice
        directory = self.directory / f"{next(free_numbers)}-{name[:60]}"
        # a fault class of the user may have fields without a JSON form
        with contextlib.suppress(BadInput):
            save(experiment, directory / FILE_NAME)
        return directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the host and remove the temporary directory, if the harness made them itself.

        A substrate or host that was passed in stays open, and a given directory stays.
        """
        if self._temporary is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._temporary.done()
        if self._makes_substrate:
            self.host.close()


def _floor(run: RawRun, undo: UndoLog) -> Floor | None:
    """Measure and return the largest distance from the twin at which a run may end.

    Returns:
        None if run and twin must be equal, the run did not end well, or the measurement failed.
    """
    history = History(run.records)
    _, reduction = exactness(run.experiment.config, history)
    ended_well = run.end is not None and run.end.ok
    return (
        floor_of(run.experiment, history, run.directory, undo)
        if ended_well and reduction == "fast"
        else None
    )


def _outside_loops(run: Callable[[], Ran]) -> Ran:
    """Call ``run`` and return its result.

    If this thread has a running event loop, as in a notebook, the call is made in another thread.
    """
    # outside an except block, else an error of the run would have the RuntimeError as its context
    if not _has_running_loop():
        return run()
    with ThreadPoolExecutor(1, thread_name_prefix="ck-run") as pool:
        return pool.submit(run).result()


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
