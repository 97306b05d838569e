"""What the runner and a supervisor say to each other."""

from __future__ import annotations

import msgspec

from chaoskit.wire.messages import Message


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a supervisor starts.

    Attributes:
        entry: ``module:function``. It is called with the arguments, listening sockets and the pid of the supervisor, in
            a process of its own, which it does not leave.
        arguments: as its function reads them.
        name: of its log. run_directory: where that lies, in ``log``.
        restarts: how often it is started again, on the same sockets, if it ends before it is over.
        over: the exit code that says that it is.
        clock_ahead_ns: how far the clock of the program's run is ahead of the supervisor's machine's.
    """

    entry: str
    arguments: bytes
    name: str
    run_directory: str
    restarts: int = 0
    over: int = 0
    clock_ahead_ns: int = 0


# -- the runner's -------------------------------------------------------------------------------------------------


class StartProgram(Message, frozen=True):
    """Start a program. Answered by :class:`ProgramStarted`.

    ``listeners``: how many listening sockets come with this message, as descriptors; after them comes the program's
    network namespace, if it ``enters`` one. ``kept``: numbers of those that the supervisor has opened itself.
    """

    number: int
    program: Program
    listeners: int = 0
    kept: tuple[int, ...] = ()
    enters: bool = False


class EndPrograms(Message, frozen=True):
    """SIGKILL these programs, and everything that they have started; before that they may end by themselves.

    ``programs``: the pid and the start time of each, as :class:`ProgramStarted` told them.
    """

    number: int
    programs: tuple[tuple[int, int | None], ...]
    patience_s: float = 0.0


class OpenListener(Message, frozen=True):
    """Open a listening socket for a program that is to be started. Answered by ``(number, host, port)``."""

    number: int
    host: str
    port: int


class CloseListener(Message, frozen=True):
    """Close a listening socket, unless a program was started with it. ``listener``: its number."""

    number: int
    listener: int


class CrashContainer(Message, frozen=True):
    """End with all others, as the first process of a container that is killed. What they have written is shipped."""


class AskClock(Message, frozen=True):
    """Ask for its CLOCK_MONOTONIC, in nanoseconds."""

    number: int


class AskAlive(Message, frozen=True):
    """Have the supervisor say :class:`SupervisorAlive`."""


class AskKernel(Message, frozen=True):
    """Ask what the kernel says of a process: one of the questions of
    :class:`chaoskit.substrate.core.processes.Kernel`.
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
    """Ask why an action of this kind cannot be done there. ``kind``: ``module:Class``. Answered by a reason, or ""."""

    number: int
    kind: str


class ApplyAction(Message, frozen=True):
    """Do an action to a node. Answered by its number; it shows itself by :class:`ActionShown`.

    ``action``: JSON of an action of this ``kind``. ``root``: pid and start time of the process below which all of the
    node runs.
    """

    number: int
    node: str
    root: tuple[int, int | None]
    run_directory: str
    kind: str
    action: bytes


class LiftAction(Message, frozen=True):
    """End an action. Answered by whether nothing of it is left."""

    number: int
    applied: int


class AskEchoes(Message, frozen=True):
    """Ask for the round trips of echoes that are being sent, in ms; None for each that was lost.

    ``applied``: the number of :class:`chaoskit.substrate.network.packets.SendEchoes`.
    """

    number: int
    applied: int


class ReleaseNode(Message, frozen=True):
    """Lift what keeps processes of a node from ending."""

    number: int
    node: str


class OpenDoor(Message, frozen=True):
    """Have a Unix socket at this path, to which processes of the node say what is for the runner, and no other one."""

    number: int
    path: str


class LineData(Message, frozen=True):
    """One message on a line through the door; goes both ways."""

    line: int
    data: bytes


class LineClosed(Message, frozen=True):
    """A line has ended; goes both ways."""

    line: int


class FindSource(Message, frozen=True):
    """Ask whether a source is in a directory. Answered by true or false. ``digest``: as :class:`StoreSource` has it."""

    number: int
    directory: str
    digest: str


class StoreSource(Message, frozen=True):
    """One piece of a tar archive, which is unpacked into ``directory/digest`` behind the last piece.

    ``digest``: SHA-256 of the archive, in hexadecimal digits. ``at``: the byte at which the piece begins.
    """

    number: int
    directory: str
    digest: str
    at: int
    data: bytes
    is_last: bool


class WriteFile(Message, frozen=True):
    """Write a small file, in place of what was there, at once for those that read it."""

    number: int
    path: str
    data: bytes


class ShipFiles(Message, frozen=True):
    """Ship the journals and logs of a run from now on, by :class:`FileChunk`, and the record of its coordinator."""

    number: int
    run_directory: str
    with_record: bool = False


class FilesTaken(Message, frozen=True):
    """So many more bytes of chunks have been taken. Nothing answers it."""

    size_bytes: int


class SettleFiles(Message, frozen=True):
    """Nothing of a run writes any more: ship what is left, then remove its directory. Answered behind the last chunk,
    by the size of each file that was shipped."""

    number: int
    run_directory: str


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
    | WriteFile
    | ShipFiles
    | FilesTaken
    | SettleFiles
    | CrashContainer
    | AskAlive
    | AskClock
)

# -- the supervisor's ---------------------------------------------------------------------------------------------


class SupervisorHello(Message, frozen=True):
    """What a supervisor that dials says first, before it imports anything.

    ``place``: which one it is, as its command line has it. ``address``: under which the processes of its node are
    reached; "" where it does not know. ``machine``: on which it is, in the words of what has put it there.
    """

    place: str
    address: str
    machine: str = ""


class SupervisorReady(Message, frozen=True):
    """Programs can be started. ``version``: of its chaoskit. ``clock``: which one it has."""

    version: str
    clock: str = ""


class SupervisorLeaves(Message, frozen=True):
    """The supervisor was told to end, as the first process of a pod is when that is deleted, evicted or preempted.

    Its programs have been told, and it ships what they write. ``grace_s``: it ends no later than that.
    """

    grace_s: float


class SupervisorAlive(Message, frozen=True):
    """It is there, and serves its runner."""


class SupervisorLeft(Message, frozen=True):
    """The last message of one that was told to end: nothing runs any more, and every file was shipped."""


class ProgramStarted(Message, frozen=True):
    """A program runs: its process, with its start time."""

    number: int
    pid: int
    ticks: int | None


class RequestDone(Message, frozen=True):
    """The answer to any other request. ``value``: as JSON."""

    number: int
    value: bytes = b"null"


class RequestFailed(Message, frozen=True):
    """A request could not be carried out. ``is_gone``: as the process, or the node, is not there any more."""

    number: int
    error: str
    is_gone: bool = False


class ProgramExited(Message, frozen=True):
    """A program has ended. ``status``: as ``wait`` gives it."""

    pid: int
    status: int


class ActionShown(Message, frozen=True):
    """How often an action in force has met something by now."""

    applied: int
    count: int


class FileChunk(Message, frozen=True):
    """What was written to a file of a run behind its first ``offset`` bytes. ``name``: below the run's directory.

    A record begins anew at 0 where another one has taken its place.
    """

    run_directory: str
    name: str
    offset: int
    data: bytes


class LineOpened(Message, frozen=True):
    """A process of the node has come to the door."""

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
