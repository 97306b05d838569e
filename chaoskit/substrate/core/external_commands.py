"""External commands: they act on machines from outside the nodes, where the user is.

An example is a command that cuts the power of a machine. They run in threads, as they take seconds.

-> ``kubernetes/machines/machine_commands.py``: the commands that a user configures, and their undo
entries. ``experiment/remote/client_line.py``: the runner for a harness that is away from the user.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Protocol

from chaoskit.errors import HarnessError

#: Carries out the command ``(name, machine)`` and returns a function that undoes it. Both raise
#: HarnessError.
CommandFunction = Callable[[str, str], Callable[[], None]]


class NotPutBack(HarnessError):
    """Error of a command that failed halfway, and whose first part could not be undone."""


class ExternalCommands(Protocol):
    """Runner of external commands in the background, identified by the numbers of their calls."""

    def begin(self, name: str, machine: str, undo_after_s: float = math.inf) -> int:
        """Start the named command for a machine and return the number of the call.

        Args:
            undo_after_s: time until the command is undone, even if :meth:`end` is never called;
                ``math.inf`` for the end of the run.
        """

    def is_done(self, call_id: int) -> bool:
        """Return whether the command has been carried out. Raises HarnessError if it failed."""

    def end(self, call_id: int) -> None:
        """Start to undo a command once it has been carried out, and return at once.

        A failed undo is an error of the run, reported by the process that tried it.
        """

    def settle(self) -> None:
        """Undo all commands at the end of the run, and wait until that is done.

        Raises HarnessError that lists the undos that failed.
        """


class ExternalCommand:
    """An external command, run in a thread of its own, as commands take seconds.

    The constructor starts it.

    Args:
        undo_after_s: time from the command's completion until it is undone; ``math.inf`` for never.

    Attributes:
        is_done: event that is set once the command has been carried out or has failed.
        failure: why the command failed, valid once ``is_done`` is set; "" if it succeeded.
        undo_failure: why the undo failed; "" if it did not.
    """

    def __init__(
        self, command_function: CommandFunction, name: str, machine: str, undo_after_s: float
    ) -> None:
        self._undo: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._timer = threading.Timer(undo_after_s, self.end) if undo_after_s < math.inf else None
        self.is_done = threading.Event()
        self.failure = self.undo_failure = ""
        self._thread = threading.Thread(
            target=self._carry_out,
            args=[command_function, name, machine],
            name=f"ck-{name}",
            daemon=True,
        )
        self._thread.start()

    def _carry_out(self, command_function: CommandFunction, name: str, machine: str) -> None:
        """Carry out the command, set ``is_done``, and start the timer of its undo.

        A failure is noted in ``failure``, and nothing is raised.
        """
        try:
            self._undo = command_function(name, machine)
        except Exception as error:  # noqa: BLE001 - reported to the run that waits
            self.failure = str(error) or type(error).__name__
        finally:
            self.is_done.set()
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Wait for the command, and undo it once if it was carried out.

        If that fails, ``undo_failure`` is set, and nothing is raised.
        """
        self._thread.join()
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_over or self._undo is None:
                return
            self._is_over = True
            try:
                self._undo()
            except Exception as error:  # noqa: BLE001 - earlier commands must be undone, too
                self.undo_failure = str(error) or type(error).__name__


class LocalCommands:
    """Runner that carries out external commands in this process."""

    def __init__(self, command_function: CommandFunction) -> None:
        self._command_function = command_function
        self._call_ids = itertools.count(1)
        self._commands: dict[int, ExternalCommand] = {}

    def begin(self, name: str, machine: str, undo_after_s: float = math.inf) -> int:
        call_id = next(self._call_ids)
        self._commands[call_id] = ExternalCommand(
            self._command_function, name, machine, undo_after_s
        )
        return call_id

    def do(self, call_id: int, name: str, machine: str, undo_after_s: float) -> str:
        """Run a command under a given call number and wait for it.

        Return why it failed; "" if it succeeded.
        """
        command = self._commands[call_id] = ExternalCommand(
            self._command_function, name, machine, undo_after_s
        )
        command.is_done.wait()
        return command.failure

    def is_done(self, call_id: int) -> bool:
        command = self._commands[call_id]
        if command.is_done.is_set() and command.failure:
            raise HarnessError(command.failure)
        return command.is_done.is_set()

    def end(self, call_id: int) -> None:
        threading.Thread(target=self._commands[call_id].end, name="ck-undo-command").start()

    def settle(self) -> None:
        """Undo all commands, the last one first, and wait.

        Raises HarnessError that lists the undos that failed.
        """
        commands, self._commands = self._commands, {}
        for command in reversed(commands.values()):
            command.end()
        if failures := [
            command.undo_failure for command in commands.values() if command.undo_failure
        ]:
            raise HarnessError(f"changes to machines could not be undone: {'; '.join(failures)}")
