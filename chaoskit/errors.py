"""The exceptions that a user of chaoskit can meet, and the form in which bad input is refused.

-> ``typed.py`` refuses arguments of a wrong type. ``cli/app.py``: exit statuses of commands.
"""

from __future__ import annotations

from collections.abc import Iterable

#: A name is close to another one from this ratio of equal letters on: one wrong letter of four.
_SIMILARITY_MIN = 0.75
_PREFIX_LENGTH_MIN = 3
_SHOWN_LENGTH_MAX = 300


def shown(value: object) -> str:
    """Return the ``repr`` of a value in one short line, or its type if ``repr`` fails."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # noqa: BLE001  # the code of any class, and an int of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_LENGTH_MAX else f"{text[:_SHOWN_LENGTH_MAX]}..."


class ChaoskitError(Exception):
    """Base class of all exceptions that chaoskit raises on purpose."""


class BadInput(ChaoskitError):
    """A wrong option, argument or file of the user.

    It is raised before anything is started if that can be known then. Calls of the trainer raise it
    while the job runs.

    Args:
        field: name of the option, argument or file that is wrong.
        value: the value that it holds.
        remedy: the correction, as an imperative sentence.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}={shown(value)}: {remedy}")

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str]]:
        return type(self), (
            self.field,
            self.value,
            self.remedy,
        )  # torch sends what a rank raises to the others


def closest_name(name: object, names: Iterable[str]) -> str:
    """Return the name that was probably meant, or "" if none is close.

    Case, ``-`` and ``_`` do not count.
    """
    from difflib import get_close_matches

    letters = _letters(str(name))
    by_letters = {_letters(candidate): candidate for candidate in names}
    same_letters = [candidate for candidate in by_letters if sorted(candidate) == sorted(letters)]
    matches = same_letters or get_close_matches(letters, by_letters, n=1, cutoff=_SIMILARITY_MIN)
    if not matches and len(letters) >= _PREFIX_LENGTH_MIN:
        longer = [candidate for candidate in by_letters if candidate.startswith(letters)]
        matches = longer if len(longer) == 1 else []
    return by_letters[matches[0]] if matches else ""


def name_remedy(name: object, names: Iterable[str], otherwise: str = "") -> str:
    """Return the remedy for a name that does not exist: ``write Kill``, or the list of all names.

    Args:
        otherwise: the remedy if no name is close, instead of the list.
    """
    existing = list(names)
    if closest := closest_name(name, existing):
        return f"write {closest}"
    return otherwise or f"use one of {', '.join(existing)}"


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


class JobFailed(ChaoskitError):
    """The training job ended without reaching its last step."""


class JournalFull(JobFailed):
    """The directory of a run had no room for its journals, so the run cannot be judged."""


class NonFiniteBatch(ChaoskitError):
    """A batch gives non-finite gradients on more than one rank, and the policy is ``stop``."""


class HarnessError(ChaoskitError):
    """chaoskit itself could not do its work; this says nothing about the job under test.

    Subclasses name causes that lie elsewhere: in a command, or in the code of a fault.
    """


class NodeUnreachable(HarnessError):
    """A node does not answer, or is taken to be gone; its processes may still run.

    Attributes:
        may_have_acted: True if the node has got a request to act, and has not answered it.
    """

    def __init__(self, text: str, *, may_have_acted: bool = False) -> None:
        super().__init__(text)
        self.may_have_acted = may_have_acted


class CommandFailed(HarnessError):
    """The unbroken run of a command failed.

    The cause is in the command, and there is no verdict.
    """


class FaultBroken(HarnessError):
    """The code of a fault raised an exception or yielded no evidence.

    The run's verdict is an error.
    """


class Refused(ChaoskitError):
    """The other side does not know the token, or does not speak this protocol."""


def error_line(error: BaseException) -> str:
    """Return an error in one line: first and last line of its message, notes and cause.

    An error without a message is named by its type. A cause that the message quotes is left out.
    Notes of several lines are left to :func:`long_notes`.
    """
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(":") if lines else type(error).__name__
    if len(lines) > 1:
        text = f"{text}: {lines[-1]}"
    notes = [note.strip() for note in getattr(error, "__notes__", ()) if "\n" not in note.strip()]
    cause = error.__cause__
    if cause is not None and (reason := error_line(cause)) not in text:
        notes.append(f"caused by {type(cause).__name__}: {reason}")
    return "; ".join([text, *notes])


def long_notes(error: BaseException) -> list[str]:
    """Return the notes of an error that have several lines, such as the end of a log."""
    return [note for note in getattr(error, "__notes__", ()) if "\n" in note.strip()]
