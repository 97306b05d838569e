"""The client of a driver: send it plans and code, and receive journals and logs.

-> experiment/remote/driver.py: the other end. substrate/kubernetes/driver_pod.py: the pod in which
it runs. substrate/supervisor/resumable_stream.py: a connection that is interrupted.
substrate/supervisor/files.py: how journals and logs come back.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from chaoskit.errors import BadInput, HarnessError, NodeUnreachable
from chaoskit.experiment.injection.command_follower import FaultStruck, LogRead
from chaoskit.experiment.injection.job_follower import Watch
from chaoskit.experiment.plan.command_plan import CommandExperiment, needed_directories
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.plan.planfile import Planned, encode
from chaoskit.experiment.remote.messages import (
    AskAble,
    DriverDone,
    DriverFailed,
    DriverSpec,
    DriverTold,
    DriverWatched,
    ExecutePlan,
    ExternalCommandDone,
    FromDriver,
    Order,
    RunExternalCommand,
    UndoExternalCommand,
    pieces,
)
from chaoskit.experiment.run.command_run import CommandRun, load_command_run
from chaoskit.experiment.run.run import RawRun, load_run
from chaoskit.experiment.twin.twin import SessionTwins
from chaoskit.faults import CATALOGUE
from chaoskit.faults.base import Fault
from chaoskit.process.linux import current_test
from chaoskit.substrate.cluster.node_files import copied_directories
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.external_commands import LocalCommands
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.messages import LineClosed, LineData, Program
from chaoskit.substrate.supervisor.remote_node import kind_name
from chaoskit.substrate.supervisor.resumable_stream import PATIENCE_S
from chaoskit.substrate.supervisor.sources import Source
from chaoskit.substrate.undo import UndoLog, sweep, temporary_directory
from chaoskit.wire import frames
from chaoskit.wire.messages import AnyMessage, InjectionReport

_ENTRY = "chaoskit.experiment.remote.driver:run_driver"
_SHOWN_LINES = 20
# a plan is sent in two forms on a line, which holds about 200 KiB of unread data
_PLAN_BYTES_MAX = 2**16
_ENDS_S = 10.0  # time of a driver to undo its faults
_decode = frames.decoder(FromDriver)
_decode_watched = frames.decoder(AnyMessage | InjectionReport | LogRead | FaultStruck)


class DriverPlace(Protocol):
    """A place where a driver can run.

    Attributes:
        substrate: the name of the substrate from which the driver takes nodes.
        files: the directory there for the files of runs.
    """

    substrate: str
    files: Path

    def require(self, demand: RunDemand) -> None:
        """Raise BadInput or HarnessError if a run cannot take place there; make nothing."""

    def open(self, undo: UndoLog) -> SupervisorLink:
        """Start a supervisor there and return the link to it. The supervisor ends with its stream.

        Args:
            undo: receives the entries that clean up if this process is killed.

        Raises:
            BadInput, HarnessError: if the supervisor cannot be started.
        """

    def do(self, name: str, machine: str) -> Callable[[], None]:
        """Run an external command on a machine there, and return the function that undoes it.

        Raises:
            HarnessError: if the command fails.
        """

    def explain_end(self) -> str:
        """Return in words what has ended the place from outside; "" if that is not known."""

    def close(self) -> None:
        """End all processes of the place."""


class Conversation:
    """The messages of a driver on its line, which the driver opens when it starts.

    Attributes:
        line: the number of the line; None until the driver has opened it.
        answers: the messages that were not handled yet, the oldest first.
    """

    def __init__(self) -> None:
        self.line: int | None = None
        self.answers = deque[FromDriver]()
        self._splitter = frames.FrameSplitter(_decode)

    def opened(self, line: int) -> None:
        """Store the line of the first process that connects, and ignore all others."""
        # the first process to connect is the driver
        self.line = line if self.line is None else self.line

    def received(self, line: int, data: bytes) -> None:
        """Add the messages in data from the driver's line to :attr:`answers`."""
        if line == self.line:
            self.answers.extend(self._splitter.feed(data))

    def closed(self, line: int) -> None:
        """Do nothing: the supervisor reports the end of the driver."""


class RemoteHost:
    """A driver on another machine, and the supervisor that starts it when it is first needed.

    Args:
        place: the place where the driver runs.
        tell: shows a line to the user, for example about a wait.

    Attributes:
        name, undo, twins: as for :class:`chaoskit.experiment.remote.host.ExperimentHost`.
        driver: the process of the driver, as its supervisor knows it; None before it is needed.
    """

    def __init__(self, place: DriverPlace, tell: Callable[[str], None]) -> None:
        sweep()  # undoes the effects of runs that were killed
        self.name, self.undo = place.substrate, UndoLog()
        self._place, self._tell = place, tell
        self._run_numbers = itertools.count(1)
        self._directory, _ = temporary_directory("driver", self.undo)
        # directories of users' fault classes, which the driver has imported
        self._imported_modules: tuple[str, ...] = ()
        # digest of a directory that was sent to the driver -> the directory
        self._sent_directories: dict[str, Path] = {}
        self.twins = SessionTwins(self._local_path)
        self._link: SupervisorLink | None = None
        self.driver: Process | None = None
        self._conversation = Conversation()
        self._external_commands = LocalCommands(place.do)

    def require(self, demand: RunDemand) -> None:
        """Raise BadInput or HarnessError if a run cannot take place there; make nothing."""
        self._place.require(demand)

    def reach(self) -> None:
        """Start the supervisor and the driver if necessary.

        Raises:
            BadInput, HarnessError: if they cannot be started.
        """
        self._connect()

    # -- orders ------------------------------------------------------------------------------------

    def why_not(self, action: type[Action]) -> str:
        """Ask the driver why an action cannot be done to its nodes; return "" if it can.

        Raises:
            BadInput, HarnessError: if the driver cannot be started, or does not answer.
        """
        return self._ask(self._connect(), AskAble(kind_name(action)))

    def execute(
        self,
        experiment: Experiment,
        directory: Path,
        *,
        watch: Watch | None,
        port: int,
        twin_id: str,
    ) -> RawRun:
        """Run a job on the driver, fetch its journals into ``directory`` and return its records.

        Raises:
            BadInput: if the plan is too large, or the driver or the job refuses it.
            HarnessError: if chaoskit failed, or the driver ended.
        """
        self._execute(experiment, directory, watch, twin_id, port)
        return load_run(directory, experiment)

    def execute_command(
        self, experiment: CommandExperiment, directory: Path, *, watch: Watch | None, twin_id: str
    ) -> CommandRun:
        """Run a command on the driver, fetch its journals and logs, and return its records.

        Raises:
            BadInput: if the plan is too large, or the driver refuses it.
            HarnessError: if chaoskit failed, or the driver ended.
        """
        self._execute(experiment, directory, watch, twin_id)
        return load_command_run(directory, experiment)

    def _execute(
        self, experiment: Planned, directory: Path, watch: Watch | None, twin_id: str, port: int = 0
    ) -> None:
        """Send a plan to the driver, execute it there and fetch the records of the run.

        They are also fetched if the run fails. A driver with other fault classes is restarted.

        Raises:
            BadInput: if the plan is too large, or the driver refuses it.
            HarnessError: if chaoskit failed, or the driver ended.
        """
        # one folder for each run: directories of several sessions may have the same name
        remote_directory = (
            self._place.files / "runs" / f"{next(self._run_numbers):03d}" / directory.name
        )
        saved = encode(experiment)
        if len(saved) > _PLAN_BYTES_MAX:
            raise BadInput(
                "faults",
                f"{len(saved)} bytes",
                f"plan fewer: a plan may have {_PLAN_BYTES_MAX} bytes",
            )
        copied = (
            copied_directories(needed_directories(experiment))
            if isinstance(experiment, CommandExperiment)
            else []
        )
        link = self._connect()
        plan = encode(self._with_remote_job(link, experiment))
        copies = {
            str(path): str(self._store(link, path, "working_directory", directory.parent))
            for path in copied
        }
        modules = tuple(str(self._store(link, root)) for root in roots_of(experiment.faults))
        # a driver does not import changed modules a second time
        if modules and modules != self._imported_modules:
            self._end_driver(link)
            link, self._imported_modules = self._connect(), modules
        link.ship(remote_directory, directory, "")
        is_watched = watch is not None
        order = ExecutePlan(
            str(remote_directory),
            plan,
            saved,
            modules,
            port,
            twin_id,
            is_watched,
            current_test(),
            copies,
        )
        try:
            self._ask(link, order, watch)
        except BaseException:
            with contextlib.suppress(HarnessError):  # fetch the records so far, for the user
                link.settle(remote_directory)
            raise
        link.settle(remote_directory)

    def _with_remote_job(self, link: SupervisorLink, experiment: Planned) -> Planned:
        """Send the folder of the job's file; return the experiment with the file's path there.

        A command, and a job of an installed package, are returned as they are: the paths of a
        command are those of the user's machine, also in its records.
        """
        if isinstance(experiment, CommandExperiment) or experiment.config.job.is_installed:
            return experiment
        job = experiment.config.job
        job = job.moved_to(self._store(link, job.folder))
        config = msgspec.structs.replace(experiment.config, job=job)
        return replace(experiment, config=config)

    def _store(
        self,
        link: SupervisorLink,
        directory: Path,
        field: str = "job",
        without: Path | None = None,
    ) -> Path:
        """Send a directory to the driver's machine, unless it is there, and return its path.

        Raises BadInput, which names ``field``, if the directory is too large or cannot be read.

        Args:
            without: a directory below it that is not sent; None for none.
        """
        source, folder = Source(directory, field, without), self._place.files / "source"
        link.store(source, folder)
        self._sent_directories[source.digest] = directory
        return folder / source.digest

    def _local_path(self, path: str) -> Path:
        """Return the local path of a file that was sent to the driver's machine.

        Any other path is returned as it is.
        """
        parts = Path(path).parts
        position = next(
            (position for position, part in enumerate(parts) if part in self._sent_directories),
            None,
        )
        return (
            Path(path)
            if position is None
            else self._sent_directories[parts[position]].joinpath(*parts[position + 1 :])
        )

    # -- the driver --------------------------------------------------------------------------------

    def _connect(self) -> SupervisorLink:
        """Return the link to the supervisor of a driver that takes orders; start them if necessary.

        Raises:
            BadInput, HarnessError: if they cannot be started.
        """
        if self._link is not None and not _serves(self._link):
            self._link.close()
            self._place.close()
            self._link = self.driver = None
        if self._link is None:
            self.twins.clear()  # the new machine may have another processor
            self._link = self._open_link()
        if self.driver is None or self.driver.pid in self._link.exits:
            self.driver = self._start(self._link)
        return self._link

    def _open_link(self) -> SupervisorLink:
        """Start a supervisor and return the link to it once it is ready.

        Raises:
            BadInput, HarnessError: if it cannot be started; nothing of it is left.
        """
        link = self._place.open(self.undo)
        try:
            if link.await_ready():
                return link
            raise HarnessError(f"{link.name} did not start")
        except BaseException:
            link.close()
            self._place.close()
            raise

    def _start(self, link: SupervisorLink) -> Process:
        """Start the driver and return its process."""
        driver_directory = self._place.files / "driver"
        self._conversation = Conversation()
        link.open_door(self._conversation, driver_directory / "door")
        link.ship(driver_directory, self._directory, "")
        spec = DriverSpec(self._place.substrate, str(driver_directory / "door"))
        return link.start(
            Program(_ENTRY, msgspec.json.encode(spec), "driver", str(driver_directory))
        )

    def _ask(self, link: SupervisorLink, order: Order, watch: Watch | None = None) -> str:
        """Send an order to the driver and return the value of its answer.

        The effects of external commands that still last are undone. If no answer comes, the driver
        is killed; the next order starts another one.

        Raises:
            BadInput, HarnessError: the error of the driver; HarnessError also if it ended.
        """
        try:
            answer = self._answer_of(link, order, watch)
        except BaseException:
            self._end_driver(link)  # an unfinished order would disturb the next one
            raise
        finally:
            self._external_commands.settle()
        if isinstance(answer, DriverDone):
            return answer.value
        if answer.field:
            raise BadInput(answer.field, answer.value, answer.reason)
        end_reason = self._place.explain_end() if not link.is_open() or link.leaves else ""
        raise HarnessError(
            f"{answer.reason}; the session has ended: {end_reason}" if end_reason else answer.reason
        )

    def _answer_of(
        self, link: SupervisorLink, order: Order, watch: Watch | None
    ) -> DriverDone | DriverFailed:
        """Send an order, handle the driver's messages and return its answer.

        Meanwhile lines are shown, messages of the run go to ``watch``, and external commands are
        run and undone.

        Raises:
            HarnessError: if the driver ends before.
        """
        conversation = self._conversation
        self._wait_until(link, lambda: conversation.line is not None)
        for piece in pieces(order):
            link.notify(LineData(conversation.line or 0, piece))
        while True:
            self._wait_until(link, lambda: bool(conversation.answers))
            match answer := conversation.answers.popleft():
                case DriverTold(text):
                    self._tell(text)
                case DriverWatched(frame):
                    for message in frames.FrameSplitter(_decode_watched).feed(frame):
                        if watch is not None:
                            watch(message)
                case RunExternalCommand(number, name, machine, lasts_s):
                    self._run_external_command(
                        link, number, name, machine, math.inf if lasts_s is None else lasts_s
                    )
                case UndoExternalCommand(number):
                    self._external_commands.end(number)
                case DriverDone() | DriverFailed():
                    return answer

    def _run_external_command(
        self, link: SupervisorLink, number: int, name: str, machine: str, lasts_s: float
    ) -> None:
        """Run an external command for the driver, and send the driver its end or its failure."""
        failure = self._external_commands.do(number, name, machine, lasts_s)
        end_report = ExternalCommandDone(number, failure)
        link.notify(LineData(self._conversation.line or 0, frames.encode(end_report)))

    def _wait_until(self, link: SupervisorLink, condition: Callable[[], bool]) -> None:
        """Wait until a condition is met.

        Raises:
            HarnessError: if the driver ends before.
        """
        if self.driver is None:
            raise self._driver_lost(link)
        pid = self.driver.pid
        if not link.hear_until(lambda: condition() or pid in link.exits) or not condition():
            raise self._driver_lost(link)

    def _driver_lost(self, link: SupervisorLink) -> HarnessError:
        """Return the error of a driver that has ended, with the end of its log or the reason."""
        if not link.is_open() or link.leaves:
            loss_in_words = "the driver of the run was told to end"
            if not link.is_open():
                loss_in_words = f"{link.name} has ended, and with it the driver of the run"
            end_reason = self._place.explain_end()
            return NodeUnreachable(
                f"{loss_in_words}: {end_reason}" if end_reason else loss_in_words
            )
        log = self._directory / "log" / "driver.log"
        lines = (
            log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:] if log.is_file() else []
        )
        return HarnessError("\n".join(["the driver of the run ended; the end of its log:", *lines]))

    def _end_driver(self, link: SupervisorLink) -> None:
        """Kill the driver, through its supervisor; the next order starts another one."""
        driver, self.driver = self.driver, None
        # the supervisor is gone, and the driver ended with it
        with contextlib.suppress(HarnessError):
            if driver is not None:
                link.finish(link.begin_end([driver], 0.0))

    def _disconnect_driver(self, link: SupervisorLink) -> None:
        """Close the line of the driver and wait for its end.

        The driver then undoes all faults.
        """
        driver, line = self.driver, self._conversation.line
        if driver is not None and line is not None:
            with contextlib.suppress(HarnessError):
                link.notify(LineClosed(line))
                link.hear_until(lambda: driver.pid in link.exits, _ENDS_S)

    def close(self) -> None:
        """End the driver and all processes that it has started, and remove its local directory."""
        try:
            if self._link is not None:
                self._disconnect_driver(self._link)
                self._link.close()
            self._place.close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            self.undo.close()


def _serves(link: SupervisorLink) -> bool:
    """Return whether a supervisor still runs and will stay.

    A proxy on the stream may notice its end late. So the supervisor is pinged, and may answer as
    long as a stream may be interrupted.
    """
    return link.is_open() and link.await_sign(link.ask_alive(), PATIENCE_S) and not link.leaves


def roots_of(faults: Iterable[Fault]) -> list[Path]:
    """Return the directories from which the modules of users' fault classes are imported.

    Returns:
        Each directory once, without those of installed modules, which must be installed on the
        driver's machine, too.

    Raises:
        BadInput: if a module was not imported by its own name.
    """
    roots = dict[Path, None]()
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    for fault_class in {type(fault): None for fault in faults if type(fault) not in CATALOGUE}:
        module = sys.modules.get(fault_class.__module__)
        if module is None or not getattr(module, "__file__", None):
            continue
        path = Path(str(module.__file__)).resolve()
        if not any(path.is_relative_to(root) for root in installed):
            module_path = Path(
                *fault_class.__module__.split("."),
                *(["__init__"] if path.stem == "__init__" else []),
            )
            if path.with_suffix("").parts[-len(module_path.parts) :] != module_path.parts:
                raise BadInput(
                    "faults",
                    fault_class.__name__,
                    f"import it as a module of its own: {path} is not {module_path}.py",
                )
            roots[path.parents[len(module_path.parts) - 1]] = None
    return list(roots)
