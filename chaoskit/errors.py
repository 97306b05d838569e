"""The errors that a user of chaoskit can meet, and the one form in which bad input is refused."""

from __future__ import annotations


class ChaoskitError(Exception):
    """Base of every error that chaoskit raises on purpose."""


class BadInput(ChaoskitError):
    """Something the user wrote cannot be done. Raised before anything is started or broken.

    Args:
        field: name of the option, argument or file that is wrong.
        value: what it holds.
        remedy: what to write instead, as an imperative sentence.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}={value!r}: {remedy}")

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.remedy)  # torch sends what a rank raises to the others


class JobFailed(ChaoskitError):
    """The training job ended without reaching its last step."""


class JournalFull(JobFailed):
    """The directory of a run has had no room for its journals for too long: what is not written cannot be judged."""


class NonFiniteBatch(ChaoskitError):
    """A batch gives non-finite gradients on more than one rank, and the policy is ``stop``."""


class HarnessError(ChaoskitError):
    """chaoskit itself could not do its work; says nothing about the job under test."""


class FaultBroken(HarnessError):
    """The code of a fault raised an exception, or yielded what is no evidence; its run is judged, and is an error."""


class Refused(ChaoskitError):
    """The other side does not know the token, or does not speak this protocol."""
