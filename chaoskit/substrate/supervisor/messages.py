"""Messages between the runner and a supervisor.

-> ``supervisor/client.py`` sends the requests, and ``supervisor/server.py`` carries them out.
``wire/messages/``: messages between coordinator, nodes and workers.
"""

from __future__ import annotations

import msgspec

from chaoskit.wire.messages import Message


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program that a supervisor starts.

    Attributes:
        entry: ``module:function``. It is called in a process of its own with the arguments, the
            listening sockets and the pid of the supervisor. The process ends when it returns.
        arguments: encoded as the function expects.
        name: name of its log.
        run_directory: directory of the run; the log lies in its folder ``log``.
        restarts: how often it is started again, on the same sockets, if it ends prematurely.
        over: exit code that means it is complete and is not started again.
        clock_ahead_ns: how far the clock of the run is ahead of the clock of the supervisor's
            machine.
    """

    entry: str
    arguments: bytes
    name: str
    run_directory: str
    restarts: int = 0
    over: int = 0
    clock_ahead_ns: int = 0


# -- requests of the runner ------------------------------------------------------------------------


class StartProgram(Message, frozen=True):
    """Start a program. Answered by :class:`ProgramStarted`.

    Attributes:
        listeners: number of listening sockets whose descriptors come with this message.
        kept: numbers of listening sockets that the supervisor has opened itself.
        enters: True if the descriptor of the program's network namespace follows those of the
            sockets.
    """

    number: int
    program: Program
    listeners: int = 0
    kept: tuple[int, ...] = ()
    enters: bool = False


class EndPrograms(Message, frozen=True):
    """End programs by SIGKILL, with everything that they have started.

    Attributes:
        programs: pid and start time of each, as in :class:`ProgramStarted`.
        patience_s: time in which they may end by themselves first.
    """

    number: int
    programs: tuple[tuple[int, int | None], ...]
    patience_s: float = 0.0


class OpenListener(Message, frozen=True):
    """Open a listening socket for a later program. Answered by ``(number, host, port)``.

    Attributes:
        port: 0 for a free one.
    """

    number: int
    host: str
    port: int


class CloseListener(Message, frozen=True):
    """Close a listening socket, unless a program was started with it.

    Attributes:
        listener: number of the socket.
    """

    number: int
    listener: int


class CrashContainer(Message, frozen=True):
    """End everything as if the first process of the container were killed.

    Output of programs is still sent.
    """


class AskClock(Message, frozen=True):
    """Request the supervisor's CLOCK_MONOTONIC, in nanoseconds."""

    number: int


class AskAlive(Message, frozen=True):
    """Request a :class:`SupervisorAlive`."""


class AskKernel(Message, frozen=True):
    """Request information of the kernel on a process. Answered by the method's result.

    Attributes:
        question: name of a method of :class:`chaoskit.substrate.core.processes.Kernel`.
    """

    number: int
    question: str
    pid: int
    ticks: int | None = None


class SendSignal(Message, frozen=True):
    """Send a signal to a process, only if it is the one that started at ``ticks``."""

    number: int
    pid: int
    ticks: int | None
    signum: int


class AskWhyNot(Message, frozen=True):
    """Request the reason why an action of this kind cannot be applied there.

    Answered by the reason; "" if it can be applied.

    Attributes:
        kind: ``module:Class``.
    """

    number: int
    kind: str


class ApplyAction(Message, frozen=True):
    """Apply an action to a node.

    Answered by ``number``, which identifies the action from then on. Its effects are reported by
    :class:`ActionShown`.

    Attributes:
        root: pid and start time of the process whose descendants are all processes of the node.
        kind: ``module:Class`` of the action.
        action: the action as JSON.
    """

    number: int
    node: str
    root: tuple[int, int | None]
    run_directory: str
    kind: str
    action: bytes


class LiftAction(Message, frozen=True):
    """End an action. Answered by a pair: whether nothing of it is left, and its last count.

    Attributes:
        applied: number of the action.
    """

    number: int
    applied: int


class AskEchoes(Message, frozen=True):
    """Request the round trips of running echoes in ms; None for each lost echo.

    Attributes:
        applied: number of a :class:`chaoskit.substrate.network.packets.SendEchoes`.
    """

    number: int
    applied: int


class ReleaseNode(Message, frozen=True):
    """Lift the actions that keep processes of a node from ending."""

    number: int
    node: str


class OpenDoor(Message, frozen=True):
    """Open the Unix socket at which processes of the node connect to the runner.

    It replaces an earlier one.
    """

    number: int
    path: str


class LineData(Message, frozen=True):
    """A message on a line through the door, in either direction."""

    line: int
    data: bytes


class LineClosed(Message, frozen=True):
    """The end of a line, in either direction."""

    line: int


class FindSource(Message, frozen=True):
    """Request whether a source is in a directory. Answered by true or false.

    Attributes:
        digest: as in :class:`StoreSource`.
    """

    number: int
    directory: str
    digest: str


class StoreSource(Message, frozen=True):
    """Store a piece of a tar archive.

    The archive is unpacked into ``directory/digest`` after its last piece.

    Attributes:
        digest: SHA-256 of the archive, in hexadecimal digits.
        at: offset of the piece in bytes.
    """

    number: int
    directory: str
    digest: str
    at: int
    data: bytes
    is_last: bool


class WriteFile(Message, frozen=True):
    """Write a small file, which replaces an old one atomically. Its directory is created."""

    number: int
    path: str
    data: bytes


class FindFile(Message, frozen=True):
    """Request whether a file is there. Answered by true or false."""

    number: int
    path: str


class RemoveDirectory(Message, frozen=True):
    """Remove a directory with all that is below it. Nothing happens if it is not there."""

    number: int
    path: str


class ShipFiles(Message, frozen=True):
    """Start to send journals and logs of a run as :class:`FileChunk`, while they are written.

    Attributes:
        with_log: True to send the coordinator's log, too.
    """

    number: int
    run_directory: str
    with_log: bool = False


class FilesTaken(Message, frozen=True):
    """Acknowledgement of ``size_bytes`` further bytes of chunks. It has no answer."""

    size_bytes: int


class SettleFiles(Message, frozen=True):
    """Send the rest of a run that is no longer written to, then remove its directory.

    Answered after the last chunk by the size of each file that was sent.

    Attributes:
        log_bytes: most bytes of logs that are sent from now on; None for all.
    """

    number: int
    run_directory: str
    log_bytes: int | None = None


Request = (
    StartProgram
    | EndPrograms
    | OpenListener
    | CloseListener
    | AskKernel
    | SendSignal
    | AskWhyNot
    | ApplyAction
    | LiftAction
    | AskEchoes
    | ReleaseNode
    | OpenDoor
    | LineData
    | LineClosed
    | FindSource
    | StoreSource
    | FindFile
    | RemoveDirectory
    | WriteFile
    | ShipFiles
    | FilesTaken
    | SettleFiles
    | CrashContainer
    | AskAlive
    | AskClock
)

# -- reports of the supervisor ---------------------------------------------------------------------


class SupervisorHello(Message, frozen=True):
    """First message of a supervisor that dials. It is sent before anything is imported.

    Attributes:
        place: name of the supervisor, from its command line.
        address: address of the processes of its node; "" if the supervisor does not know it.
        machine: name of the machine, as used by the platform; "" if unknown.
    """

    place: str
    address: str
    machine: str = ""


class SupervisorReady(Message, frozen=True):
    """Report that programs can be started.

    Attributes:
        version: version of the supervisor's chaoskit.
        clock: identity of its monotonic clock.
    """

    version: str
    clock: str = ""


class SupervisorLeaves(Message, frozen=True):
    """Report that the supervisor has received SIGTERM: its pod is deleted, evicted or preempted.

    Its programs have received SIGTERM, and their output is still sent.

    Attributes:
        grace_s: time within which the supervisor ends.
    """

    grace_s: float


class SupervisorAlive(Message, frozen=True):
    """Sign of life: the supervisor serves its runner."""


class SupervisorLeft(Message, frozen=True):
    """Last message of a supervisor that leaves: nothing runs, and all files were sent."""


class ProgramStarted(Message, frozen=True):
    """The process of a started program, with its start time."""

    number: int
    pid: int
    ticks: int | None


class RequestDone(Message, frozen=True):
    """Answer to any other request.

    Attributes:
        value: result as JSON.
    """

    number: int
    value: bytes = b"null"


class RequestFailed(Message, frozen=True):
    """Report that a request could not be carried out.

    Attributes:
        is_gone: True if the process or the node does not exist any more.
    """

    number: int
    error: str
    is_gone: bool = False


class ProgramExited(Message, frozen=True):
    """Report that a program has ended.

    Attributes:
        status: wait status.
    """

    pid: int
    status: int


class ActionShown(Message, frozen=True):
    """Report of the current count of the effects of an action in force.

    Attributes:
        applied: number of the action.
    """

    applied: int
    count: int


class FileChunk(Message, frozen=True):
    """Part of a file of a run, which begins at byte ``offset``.

    The coordinator's log starts again at 0 if another file has replaced it.

    Attributes:
        name: path of the file below the run's directory.
    """

    run_directory: str
    name: str
    offset: int
    data: bytes


class LineOpened(Message, frozen=True):
    """Report that a process of the node has connected to the door."""

    line: int


Report = (
    SupervisorReady
    | SupervisorLeaves
    | SupervisorLeft
    | SupervisorAlive
    | ProgramStarted
    | RequestDone
    | RequestFailed
    | ProgramExited
    | ActionShown
    | FileChunk
    | LineOpened
    | LineData
    | LineClosed
)
