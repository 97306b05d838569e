"""The client's side: plans and code go to a driver, journals and logs come back."""

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

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.injection.follow import Watch
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.plan.planfile import Planned, encode
from chaoskit.experiment.remote.messages import (
    AskAble,
    DoErrand,
    DriverDone,
    DriverFailed,
    DriverSpec,
    DriverTold,
    DriverWatched,
    EndErrand,
    ErrandDone,
    ExecutePlan,
    FromDriver,
    Order,
    pieces,
)
from chaoskit.experiment.run.command_run import CommandRun, load_command_run
from chaoskit.experiment.run.run import RawRun, load_run
from chaoskit.experiment.twin.twin import SessionTwins
from chaoskit.faults import CATALOGUE
from chaoskit.faults.base import Fault
from chaoskit.process.linux import current_test
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.external_commands import ErrandsHere
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.supervisor.client import SupervisorGone, SupervisorLink
from chaoskit.substrate.supervisor.messages import LineClosed, LineData, Program
from chaoskit.substrate.supervisor.remote_node import kind_name
from chaoskit.substrate.supervisor.resumable_stream import PATIENCE_S
from chaoskit.substrate.supervisor.sources import Source
from chaoskit.substrate.undo import UndoLog, sweep, temporary_directory
from chaoskit.wire import frames
from chaoskit.wire.messages import AnyMessage, InjectionReport

_ENTRY = "chaoskit.experiment.remote.driver:run_driver"
_SHOWN_LINES = 20
_PLAN_BYTES_MAX = (
    2**16
)  # it goes in two forms on a line, which holds about 200 KiB that are not read at once
_ENDS_S = 10.0  # that a driver has to put back what it has broken
_decode = frames.decoder(FromDriver)
_decode_watched = frames.decoder(AnyMessage | InjectionReport)


class DriverPlace(Protocol):
    """Where a driver runs.

    Attributes:
        substrate: from which it takes nodes, by name. files: directory there for what belongs to runs.
    """

    substrate: str
    files: Path

    def require(self, demand: RunDemand) -> None:
        """Refuse a run that cannot take place there, before anything is made. Raises BadInput, HarnessError."""

    def open(self, undo: UndoLog) -> SupervisorLink:
        """A supervisor there, which lasts as long as its stream. Raises BadInput, HarnessError.

        ``undo``: takes what must be put back if this process is killed.
        """

    def do(self, name: str, machine: str) -> Callable[[], None]:
        """Do what has this name to a machine there, from here. Gives what puts it back. Raises HarnessError."""

    def explain_end(self) -> str:
        """Return what has ended it from outside, in words; "" if nothing shows that."""

    def close(self) -> None:
        """End everything there."""


class Conversation:
    """What a driver says on its line, which it opens when it starts."""

    def __init__(self) -> None:
        self.line: int | None = None
        self.answers = deque[FromDriver]()
        self._splitter = frames.Splitter(_decode)

    def opened(self, line: int) -> None:
        self.line = (
            line if self.line is None else self.line
        )  # no process but the first is the driver

    def said(self, line: int, data: bytes) -> None:
        if line == self.line:
            self.answers.extend(self._splitter.feed(data))

    def closed(self, line: int) -> None:
        """Do nothing: the supervisor says that the driver has ended."""


class RemoteHost:
    """A driver, and the supervisor that starts it when it is first needed.

    Args:
        tell: shows people a line, such as what is waited for.

    Attributes:
        driver: its process, as its supervisor knows it; None before it is needed.
    """

    def __init__(self, place: DriverPlace, tell: Callable[[str], None]) -> None:
        sweep()  # what runs that were killed have left behind
        self.name, self.undo = place.substrate, UndoLog()
        self._place, self._tell = place, tell
        self._numbers = itertools.count(1)
        self._directory, _ = temporary_directory("driver", self.undo)
        self._modules: tuple[
            str, ...
        ] = ()  # directories of users' own faults, which the driver has imported
        self._stored: dict[
            str, Path
        ] = {}  # digest of a directory that has travelled -> the directory
        self.twins = SessionTwins(self._here)
        self._link: SupervisorLink | None = None
        self.driver: Process | None = None
        self._conversation = Conversation()
        self._errands = ErrandsHere(place.do)

    def require(self, demand: RunDemand) -> None:
        self._place.require(demand)

    def reach(self) -> None:
        self._reached()

    # -- what is asked of it --------------------------------------------------------------------------------------

    def why_not(self, action: type[Action]) -> str:
        return self._ask(self._reached(), AskAble(kind_name(action)))

    def execute(
        self,
        experiment: Experiment,
        directory: Path,
        *,
        watch: Watch | None,
        port: int,
        twin_id: str,
    ) -> RawRun:
        self._execute(experiment, directory, watch, twin_id, port)
        return load_run(directory, experiment)

    def execute_command(
        self, experiment: CommandExperiment, directory: Path, *, watch: Watch | None, twin_id: str
    ) -> CommandRun:
        self._execute(experiment, directory, watch, twin_id)
        return load_command_run(directory, experiment)

    def _execute(
        self, experiment: Planned, directory: Path, watch: Watch | None, twin_id: str, port: int = 0
    ) -> None:
        # a folder for each run: directories of several sessions have the same names
        there = self._place.files / "runs" / f"{next(self._numbers):03d}" / directory.name
        saved = encode(experiment)
        if len(saved) > _PLAN_BYTES_MAX:
            raise BadInput(
                "faults",
                f"{len(saved)} bytes",
                f"plan fewer: {_PLAN_BYTES_MAX} bytes of a plan travel",
            )
        link = self._reached()
        plan = encode(self._seen_there(link, experiment))
        modules = tuple(str(self._store(link, root)) for root in roots_of(experiment.faults))
        if (
            modules and modules != self._modules
        ):  # one that has imported them once would not do it again
            self._end_driver(link)
            link, self._modules = self._reached(), modules
        link.ship(there, directory, "")
        is_watched = watch is not None
        order = ExecutePlan(
            str(there), plan, saved, modules, port, twin_id, is_watched, current_test()
        )
        try:
            self._ask(link, order, watch)
        except BaseException:
            with contextlib.suppress(HarnessError):  # as far as it was written, for people
                link.settle(there)
            raise
        link.settle(there)

    def _seen_there(self, link: SupervisorLink, experiment: Planned) -> Planned:
        """The same, with the job's file where it is there."""
        if isinstance(experiment, CommandExperiment) or experiment.config.job.is_installed:
            return experiment
        job = experiment.config.job
        job = job.moved_to(self._store(link, job.folder))
        config = msgspec.structs.replace(experiment.config, job=job)
        return replace(experiment, config=config)

    def _store(self, link: SupervisorLink, directory: Path) -> Path:
        source, there = Source(directory), self._place.files / "source"
        link.store(source, there)
        self._stored[source.digest] = directory
        return there / source.digest

    def _here(self, path: str) -> Path:
        """Where a file that has travelled is here."""
        parts = Path(path).parts
        at = next((at for at, part in enumerate(parts) if part in self._stored), None)
        return Path(path) if at is None else self._stored[parts[at]].joinpath(*parts[at + 1 :])

    # -- the driver -----------------------------------------------------------------------------------------------

    def _reached(self) -> SupervisorLink:
        """The supervisor of a driver that takes orders. Raises BadInput, HarnessError."""
        if self._link is not None and not _serves(self._link):
            self._link.close()
            self._place.close()
            self._link = self.driver = None
        if self._link is None:
            self.twins.clear()  # it may be another processor
            self._link = self._opened()
        if self.driver is None or self.driver.pid in self._link.exits:
            self.driver = self._start(self._link)
        return self._link

    def _opened(self) -> SupervisorLink:
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
        home = self._place.files / "driver"
        self._conversation = Conversation()
        link.open_door(self._conversation, home / "door")
        link.ship(home, self._directory, "")
        spec = DriverSpec(self._place.substrate, str(home / "door"))
        return link.start(Program(_ENTRY, msgspec.json.encode(spec), "driver", str(home)))

    def _ask(self, link: SupervisorLink, order: Order, watch: Watch | None = None) -> str:
        """Have the driver carry out an order. Gives what was asked for.

        Raises:
            BadInput, HarnessError: as the driver did; and if it ended.
        """
        try:
            answer = self._carried_out(link, order, watch)
        except BaseException:
            self._end_driver(link)  # what it does would be in the way of the next order
            raise
        finally:
            self._errands.settle()
        if isinstance(answer, DriverDone):
            return answer.value
        if answer.field:
            raise BadInput(answer.field, answer.value, answer.reason)
        why = self._place.explain_end() if not link.is_open() or link.leaves else ""
        raise HarnessError(
            f"{answer.reason}; the session has ended: {why}" if why else answer.reason
        )

    def _carried_out(
        self, link: SupervisorLink, order: Order, watch: Watch | None
    ) -> DriverDone | DriverFailed:
        conversation = self._conversation
        self._hear(link, lambda: conversation.line is not None)
        for piece in pieces(order):
            link.tell(LineData(conversation.line or 0, piece))
        while True:
            self._hear(link, lambda: bool(conversation.answers))
            match answer := conversation.answers.popleft():
                case DriverTold(text):
                    self._tell(text)
                case DriverWatched(frame):
                    for message in frames.Splitter(_decode_watched).feed(frame):
                        if watch is not None:
                            watch(message)
                case DoErrand(number, name, machine, lasts_s):
                    self._do(link, number, name, machine, math.inf if lasts_s is None else lasts_s)
                case EndErrand(number):
                    self._errands.end(number)
                case DriverDone() | DriverFailed():
                    return answer

    def _do(
        self, link: SupervisorLink, number: int, name: str, machine: str, lasts_s: float
    ) -> None:
        failure = self._errands.do(number, name, machine, lasts_s)
        done = ErrandDone(number, failure)
        link.tell(LineData(self._conversation.line or 0, frames.encode(done)))

    def _hear(self, link: SupervisorLink, condition: Callable[[], bool]) -> None:
        """Wait until a condition is met. Raises HarnessError if the driver ends before."""
        assert self.driver is not None
        pid = self.driver.pid
        if not link.hear_until(lambda: condition() or pid in link.exits) or not condition():
            raise self._lost(link)

    def _lost(self, link: SupervisorLink) -> HarnessError:
        if not link.is_open() or link.leaves:
            gone = "the driver of the run was told to go"
            if not link.is_open():
                gone = f"{link.name} is gone, and with it the driver of the run"
            why = self._place.explain_end()
            return SupervisorGone(f"{gone}: {why}" if why else gone)
        log = self._directory / "log" / "driver.log"
        lines = (
            log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:] if log.is_file() else []
        )
        return HarnessError("\n".join(["the driver of the run ended; its last words:", *lines]))

    def _end_driver(self, link: SupervisorLink) -> None:
        driver, self.driver = self.driver, None
        with contextlib.suppress(HarnessError):  # its supervisor is gone, and has ended it
            if driver is not None:
                link.finish(link.begin_end([driver], 0.0))

    def _dismiss_driver(self, link: SupervisorLink) -> None:
        """Hang up: it ends by itself, and leaves nothing."""
        driver, line = self.driver, self._conversation.line
        if driver is not None and line is not None:
            with contextlib.suppress(HarnessError):
                link.tell(LineClosed(line))
                link.hear_until(lambda: driver.pid in link.exits, _ENDS_S)

    def close(self) -> None:
        """End the driver, and all that it has started."""
        try:
            if self._link is not None:
                self._dismiss_driver(self._link)
                self._link.close()
            self._place.close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            self.undo.close()


def _serves(link: SupervisorLink) -> bool:
    """Whether a supervisor is there still, and stays. What passes on its stream may learn of its end later than others:
    it is asked, and the answer is waited for as long as a stream may be interrupted."""
    return link.is_open() and link.await_sign(link.ask_alive(), PATIENCE_S) and not link.leaves


def roots_of(faults: Iterable[Fault]) -> list[Path]:
    """Directories from which the modules of users' own faults are imported. Installed ones must be there, too."""
    roots = dict[Path, None]()
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    for kind in {type(fault): None for fault in faults if type(fault) not in CATALOGUE}:
        module = sys.modules.get(kind.__module__)
        if module is None or not getattr(module, "__file__", None):
            continue
        path = Path(str(module.__file__)).resolve()
        if not any(path.is_relative_to(one) for one in installed):
            named = Path(
                *kind.__module__.split("."), *(["__init__"] if path.stem == "__init__" else [])
            )
            if path.with_suffix("").parts[-len(named.parts) :] != named.parts:
                raise BadInput(
                    "faults",
                    kind.__name__,
                    f"import it as a module of its own: {path} is not {named}.py",
                )
            roots[path.parents[len(named.parts) - 1]] = None
    return list(roots)
