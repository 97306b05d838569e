"""What one experiment showed: plain data, written as ``outcome.json`` and read by reports.

Functions that raise for a test set ``__tracebackhide__``: pytest then shows the line of the test.

Times named ``*_s`` are seconds since the start of the run on the monotonic clock, unless the name says a duration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput, name_remedy
from chaoskit.journal import Record, read_journals
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.typed import LimitS, typed_arguments
from chaoskit.vocabulary import Event, Verdict

#: Names of the checks that tell whether a run recovered: where something was lost, and where nothing was.
RECOVERED, COMPLETED = "recovered from every incident", "training completed"
COMMITTED_STEPS = "committed steps kept"


class EvidenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One observation about a fault. ``level`` is armed, effective or impactful."""

    level: str
    at_s: float
    observed: str


class FaultRecord(msgspec.Struct, kw_only=True):
    """A planned fault and what became of it.

    ``state`` is confirmed, not observed, not fired, missed or undo failed. A fault that was missed was injected.
    """

    fault: str  # e.g. "Kill(rank=2, at_step=20)"
    kind: str  # e.g. "Kill"
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    moment: str = ""  # when it was due, in words, e.g. "in reduce of step 20"
    injected_s: float | None = None
    state: str = "not fired"
    evidence: list[EvidenceRecord] = []
    undone: bool = True


class PhaseSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a recovery.

    ``reference_s`` is what the plain operation alone takes, such as building a group or training a step; ``reference``
    says which. It is measured elsewhere, or in other steps, and is for scale: a phase may take less.
    """

    name: str  # one of chaoskit.vocabulary.RECOVERY_PHASES
    start_s: float
    end_s: float
    reference_s: float
    reference: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """From one fault (or one group of overlapping faults) back to training."""

    cause: str  # e.g. "rank 2: killed by SIGKILL"
    fault: (
        str | None
    )  # text of the injected fault, or of a pod's end that the run has not asked for; else None
    injected_s: float
    generation: int
    world: int  # ranks in the first generation after the fault; 0 where that is not known
    spans: list[PhaseSpan]
    seconds: float  # injected -> first committed step
    full_strength_seconds: (
        float | None
    )  # injected -> first committed step at the full world; None if never, or unknown
    step_seconds: float  # median step time before the fault, for scale


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which some piece of a sharded state lacked copies: another loss could have been one too many."""

    fault: str | None  # text of the injected fault; None where none is known
    begun_s: float  # of the fault, where there is one; else of the moment when it became known
    seconds: float | None  # until every piece had all its copies again; None if that never came
    pieces: list[int]  # that lacked copies, as far as is known: what had none yet has no number


class CopyInterval(msgspec.Struct, frozen=True, kw_only=True):
    """The most work of a replicated job that lay between two copies of its state in memory.

    If every rank ends inside one update, at most so many steps are computed again; no other loss costs one.
    """

    steps: int
    seconds: float


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step. ``seconds`` is the time since the step before it was committed.

    Of a command, all that is known of a step is what its log shows: the time is that of the last line about it, the
    generation counts how often the training has begun again, and the world is not known (0).
    """

    step: int
    loss: float | None  # None: the batch was skipped
    at_s: float
    seconds: float
    generation: int
    world: int


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One assertion over the journals."""

    name: str
    verdict: Verdict
    detail: str


class RuleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A log rule fired. ``where``: the worker, of a command the node. ``action``: what it asked for."""

    rule: str
    verdict: str  # slow, hanging, not-a-number, faulted, stopped
    where: str
    rank: int | None
    step: int | None
    at_s: float
    reason: str
    action: str
    excused: str = ""  # why nothing was done, where something was asked for

    def __str__(self) -> str:
        place = self.where if self.rank is None else f"rank {self.rank}"
        act = "" if self.action in ("none", "alert") else f" -> {self.action}"
        return f"{self.rule}, {place}: {self.verdict}, {self.reason}{f'; {self.excused}' if self.excused else act}"


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log of a node whose command failed: the line that says why, and lines around it.

    Attributes:
        error: the line that looks most like the cause; "" where none looks like an error.
    """

    node: str
    path: str
    error: str
    lines: list[str]

    def __str__(self) -> str:
        cause = [f"the last error on {self.node}: {self.error}"] if self.error else []
        return "\n".join([*cause, f"from {self.path}:", *(f"  {line}" for line in self.lines)])


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Sample accounting: every sample of every committed step, exactly once."""

    steps: int
    samples: int
    missing: list[str] = []  # e.g. "step 21 shard 2"
    repeated: list[str] = []
    skipped: list[str] = []


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the test that made a run ended.

    Attributes:
        failed: in its own code, after the run; a verdict that fails it is no failure of its own.
        message: kind and first line of the error.
    """

    __test__ = False  # pytest shall not collect it

    nodeid: str
    failed: bool = False
    message: str = ""


class Outcome(msgspec.Struct, kw_only=True):
    """Everything one run showed.

    ``settings`` are the fields of the run's configuration that are not the default's, beside those that are here.
    ``account`` says where the time went. It, ``ledger`` and ``false_alarms`` are None where nothing is known of them:
    of a command, a black box. ``claimed`` is False where a test judges the run by itself: then its verdict says nothing
    about recovery. ``session`` names the pytest session that made the run, as several may share a report directory.
    ``not_recovered`` is what ``assert_recovered`` found missing.
    """

    name: str
    job: str
    stack: str = "chaoskit"
    substrate: str
    nodes: int
    spares: int
    seed: int
    reduction: str
    started: str  # wall clock, ISO 8601, for people only
    wall_s: float
    verdict: Verdict
    reasons: list[str]
    steps: list[StepPoint]
    twin_losses: list[float | None] | None = None
    faults: list[FaultRecord] = []
    recoveries: list[Recovery] = []
    exposures: list[Exposure] = []
    copies: CopyInterval | None = None  # None where no replicated state was copied
    rules_fired: list[RuleRecord] = []
    log_ends: list[LogEnd] = []  # of nodes whose command failed
    checks: list[Check] = []
    not_applied: dict[str, str] = {}  # check -> why it says nothing about this run
    ledger: Ledger | None
    lost_steps: int
    false_alarms: int | None = 0
    weights_digest: str | None = None
    twin_weights_digest: str | None = None
    environment: dict[str, Any] = {}
    directory: str = ""
    settings: dict[str, Any] = {}
    claimed: bool = True
    session: str = ""  # empty outside of pytest
    account: TimeAccount | None = None
    hang_limits_ms: dict[str, int] = {}  # by phase, at the end; empty where none were known
    run_id: str = ""  # by which a history knows it; empty outside of pytest
    suspects: int = 0  # ranks that were given up because a phase lasted longer
    refused_connections: int = (
        0  # at the coordinator, of clients that did not show the token or keep the protocol
    )
    test: TestResult | None = None  # None outside of pytest, and until the test is over
    not_recovered: str = ""

    @property
    def came_back(self) -> bool | None:
        """Whether the training went on after every incident; None where the run says nothing of it.

        What else failed the run, such as losses that differ, does not count. A run that lost nothing came back if it
        completed. A run that is unknown, and one in which the harness failed, say nothing.
        """
        if self.verdict not in (Verdict.PASSED, Verdict.FAILED):
            return None
        verdicts = {check.name: check.verdict for check in self.checks}
        verdict = verdicts.get(RECOVERED) or verdicts.get(COMPLETED) or self.verdict
        return {Verdict.PASSED: True, Verdict.FAILED: False}.get(verdict)

    @property
    def recovered(self) -> bool | None:
        """Whether the run came back, and ``assert_recovered`` did not deny it; None where nothing is known."""
        return False if self.not_recovered and self.came_back else self.came_back

    @property
    def result(self) -> Verdict:
        """The worse of the verdict and of the test that made the run: what reports show."""
        failed = self.test is not None and self.test.failed
        return Verdict.worst([self.verdict, Verdict.FAILED if failed else Verdict.PASSED])

    @property
    def result_reasons(self) -> list[str]:
        """Why the result is not ``passed``."""
        failed = self.test is not None and self.test.failed
        return (
            [*self.reasons, f"the test failed: {self.test.message}"]
            if self.test and failed
            else self.reasons
        )

    @property
    def losses(self) -> list[float | None]:
        """Loss of every finished step; None where the batch was skipped."""
        return [point.loss for point in self.steps]

    @property
    def recovery(self) -> Recovery:
        """The slowest recovery of the run.

        Raises:
            AssertionError: if there was none.
        """
        __tracebackhide__ = True
        if not self.recoveries:
            raise AssertionError(
                f"{self.name}: the run shows no recovery; {'; '.join(self.reasons) or 'no fault struck'}"
            )
        return max(self.recoveries, key=lambda recovery: recovery.seconds)

    @typed_arguments
    def records(self, *events: str) -> list[Record]:
        """Journal records of the run with these events, such as ``"commit"`` and ``"detected"``, ordered by time.

        Args:
            events: their names; all records where none is given.

        Raises:
            BadInput: for an event that does not exist.
        """
        if unknown := sorted(set(events) - set(Event)):
            raise BadInput("events", unknown[0], name_remedy(unknown[0], sorted(Event)))
        found = read_journals(Path(self.directory) / "journal")
        return [record for record in found if not events or record.event in events]

    @typed_arguments
    def assert_recovered(
        self,
        *,
        within_s: LimitS,
        lost_steps: int = 0,
        false_alarms: int = 0,
        bit_equal: bool = True,
    ) -> None:
        """Assert that the run recovered, each time within ``within_s``, and lost nothing else.

        A run that does not counts as not recovered in the recovery probability and in a history.

        Args:
            within_s: limit of the slowest recovery, from the fault to the next committed step.
            lost_steps: committed steps that may have been computed again.
            false_alarms: detections without a fault that may have happened.
            bit_equal: losses and final weights equal those of the unbroken run.

        Raises:
            AssertionError: naming what was exceeded, or that the run shows no recovery.
        """
        __tracebackhide__ = True
        try:
            self._assert_within(within_s, lost_steps, false_alarms)
            if bit_equal:
                self.assert_same_losses_as_twin()
        except AssertionError as error:
            self.not_recovered = str(error)
            raise

    def _assert_within(self, within_s: float, lost_steps: int, false_alarms: int) -> None:
        __tracebackhide__ = True
        if self.recovery.seconds > within_s:
            raise AssertionError(
                f"{self.name}: a recovery took {self.recovery.seconds:.3f} s, more than {within_s:g} s"
            )
        if self.lost_steps > lost_steps:
            raise AssertionError(
                f"{self.name}: {self.lost_steps} steps were lost, more than {lost_steps}"
            )
        if (self.false_alarms or 0) > false_alarms:
            raise AssertionError(
                f"{self.name}: {self.false_alarms} false alarms, more than {false_alarms}"
            )

    def assert_same_losses_as_twin(self) -> None:
        """Every loss, and the final weights, equal those of the unbroken run, bit for bit.

        Raises:
            AssertionError: naming the first step that differs.
        """
        __tracebackhide__ = True
        if self.twin_losses is None:
            raise AssertionError(
                f"{self.name}: there is no twin to compare with; run with twin=True"
            )
        losses = {point.step: point.loss for point in self.steps}
        for step, theirs in enumerate(self.twin_losses):
            mine = losses.get(step)
            if step <= max(losses, default=-1) and repr(mine) != repr(theirs):
                raise AssertionError(
                    f"{self.name}: loss of step {step} is {mine!r}, the unbroken run's is {theirs!r}"
                )
        steps = max(losses, default=-1) + 1
        if steps != len(self.twin_losses):
            raise AssertionError(
                f"{self.name}: {steps} steps, the unbroken run has {len(self.twin_losses)}"
            )
        if self.weights_digest != self.twin_weights_digest:
            raise AssertionError(
                f"{self.name}: all losses are equal, but the final weights are not"
            )
