"""Messages between a client and its driver: an order, messages in both directions, and one answer
that ends the order.

-> experiment/remote/client.py and driver.py: what each end does with them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from chaoskit.wire import frames
from chaoskit.wire.messages import Message


class DriverSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of the driver program.

    Attributes:
        substrate: the name of the substrate from which the driver takes nodes.
        door: the path of the socket at which the driver receives orders.
    """

    substrate: str
    door: str


class AskAble(Message, frozen=True):
    """Ask why an action cannot be done to the driver's nodes. Answered by :class:`DriverDone`.

    Attributes:
        action: the kind of action, as ``module:Class``.
    """

    action: str


class ExecutePlan(Message, frozen=True):
    """Run a plan. Answered by :class:`DriverDone` once all of its records are written.

    Attributes:
        run_directory: the directory of the run on the driver's machine.
        plan: the plan with the paths of its files on the driver's machine.
        saved: the plan as saved in the directory of the run.
        modules: directories from which the modules of its faults are imported.
        port: the port of the coordinator; 0 for a free one.
        twin_id: the run id of the unbroken run to compare with, or
            :data:`chaoskit.experiment.run.run.LATER`; "" for none.
        watched: the client wants the messages of the run; see :class:`DriverWatched`.
        test: the test of the run, as pytest names it; "" outside of a test.
        copies: for a command, directory on the client's machine -> its copy on the driver's.
    """

    run_directory: str
    plan: bytes
    saved: bytes
    modules: tuple[str, ...] = ()
    port: int = 0
    twin_id: str = ""
    watched: bool = False
    test: str = ""
    copies: dict[str, str] = msgspec.field(default_factory=dict)


class ExternalCommandDone(Message, frozen=True):
    """Report of the client that an external command has ended.

    Attributes:
        number: the number of the command.
        failure: the reason why it failed; "" if it succeeded.
    """

    number: int
    failure: str = ""


class RunExternalCommand(Message, frozen=True):
    """Order to the client to run an external command on a machine.

    Attributes:
        number: the number of the command.
        name: the name of the command.
        machine: the name of the machine.
        lasts_s: time in seconds after which the effect is undone; None for the end of the order.
    """

    number: int
    name: str
    machine: str
    lasts_s: float | None = None


class UndoExternalCommand(Message, frozen=True):
    """Order to the client to undo the effect of the external command with this number now."""

    number: int


class DriverTold(Message, frozen=True):
    """A line to show to the user, for example about a wait."""

    line: str


class DriverWatched(Message, frozen=True):
    """A message of the run for live views, in its frame."""

    data: bytes


class DriverDone(Message, frozen=True):
    """Answer to an order that was carried out.

    Attributes:
        value: the answer to a question; empty for other orders.
    """

    value: str = ""


class DriverFailed(Message, frozen=True):
    """Answer to an order that failed.

    Attributes:
        reason: the error.
        field: the field of the plan that is wrong; "" if the plan is not the reason.
        value: the value of that field.
    """

    reason: str
    field: str = ""
    value: str = ""


_PIECE_BYTES = 2**15


def pieces(message: Message) -> Iterator[bytes]:
    """Yield a message in pieces that fit a line.

    They are joined by :class:`chaoskit.wire.frames.FrameSplitter`.
    """
    data = frames.encode(message)
    for offset in range(0, len(data), _PIECE_BYTES):
        yield data[offset : offset + _PIECE_BYTES]


Order = AskAble | ExecutePlan
ToDriver = Order | ExternalCommandDone
FromDriver = (
    DriverTold
    | DriverWatched
    | RunExternalCommand
    | UndoExternalCommand
    | DriverDone
    | DriverFailed
)
