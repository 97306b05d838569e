"""The outcome of one experiment: plain data, written as ``outcome.json`` and read by reports.

Functions that raise for a test set ``__tracebackhide__``, so that pytest shows the line of the
test.

Times named ``*_s`` are seconds since the start of the run on the monotonic clock, unless the name
says a duration.

-> experiment/judge/judge.py and experiment/judge/command_judge.py compute all of it.
experiment/run/recovery_timeline.py: how the time of a recovery is measured. history/record.py: the
part that is kept for later sessions.
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

#: Names of the checks that show whether a run recovered: after a loss, and without one.
RECOVERED, COMPLETED = "recovered from every incident", "training completed"
COMMITTED_STEPS = "committed steps kept"


class EvidenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An observation about a fault.

    ``level`` is ``armed``: the target was in the planned place; ``effective``: the evidence of the
    fault; or ``impactful``: a loss or bad numbers that followed.
    """

    level: str
    at_s: float
    observed: str


class FaultRecord(msgspec.Struct, kw_only=True):
    """A planned fault and its result.

    ``state`` is ``confirmed`` (there is evidence), ``not observed`` (it struck without evidence),
    ``not fired`` (it never struck), ``missed`` (it was injected, and failed or came too late) or
    ``undo failed``. ``injected_s`` is None, and ``evidence`` empty, for a fault that did not fire
    or was missed; ``rank`` is then the planned rank, or None for a role. Otherwise it is that of
    the target.
    """

    fault: str  # e.g. "Kill(rank=2, at_step=20)"
    kind: str  # e.g. "Kill"
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    moment: str = ""  # the moment at which it was due, in words, e.g. "in reduce of step 20"
    injected_s: float | None = None
    state: str = "not fired"
    evidence: list[EvidenceRecord] = []
    undone: bool = True


class PhaseSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a recovery.

    ``reference_s`` is the time of the plain operation alone, such as building a group or training a
    step; ``reference`` names it. It is measured elsewhere, or in other steps, and is for scale: a
    phase may take less.
    """

    name: str  # one of chaoskit.vocabulary.RECOVERY_PHASES
    start_s: float
    end_s: float
    reference_s: float
    reference: str

    @property
    def seconds(self) -> float:
        """The duration of the phase, in seconds."""
        return self.end_s - self.start_s


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The recovery from a fault, or from a group of overlapping faults, back to training.

    It also exists for a loss without a known fault, such as that of a pod that was taken away.
    """

    cause: str  # e.g. "rank 2: killed by SIGKILL"
    # text of the injected fault, or of the end of a pod that the run did not ask for; else None
    fault: str | None
    injected_s: float
    generation: int
    world: int  # ranks in the first generation after the fault; 0 if not known
    spans: list[PhaseSpan]
    seconds: float  # injected -> first committed step
    # injected -> first committed step at the full world; None if never or not known
    full_strength_seconds: float | None
    step_seconds: float  # median step time before the fault, for scale


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a piece of a sharded state lacked copies.

    Another loss could have destroyed the piece.
    """

    fault: str | None  # text of the injected fault; None if no fault is known
    begun_s: float  # the time of the fault, or else of the record of the lack
    seconds: float | None  # until every piece had all its copies again; None if that never happened
    # numbers of the pieces that lacked copies; a piece that had no copy yet has no number
    pieces: list[int]


class CopyInterval(msgspec.Struct, frozen=True, kw_only=True):
    """The largest amount of work of a replicated job between two copies of its state in memory.

    If every rank ends inside one update, at most so many steps are computed again. No other loss
    costs a step.
    """

    steps: int
    seconds: float


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A finished step. ``seconds`` is the time since the end of the step before; 0 for the first.

    For a command, only the log is known. The time is that of the last line about the step. The
    generation counts how often the training has begun again. The world is not known (0). The loss
    is None if the log shows none.
    """

    step: int
    loss: float | None  # None: the batch was skipped
    at_s: float
    seconds: float
    generation: int
    world: int


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one assertion over the journals.

    Attributes:
        name: the assertion in words.
        verdict: the verdict on it.
        detail: the numbers that were checked, or the first problems.
    """

    name: str
    verdict: Verdict
    detail: str


class RuleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A log rule that fired.

    ``where`` is the worker, or for a command the node; ``action`` is the action of the rule.
    """

    rule: str
    verdict: str  # slow, hanging, not-a-number, faulted, stopped
    where: str
    rank: int | None
    step: int | None
    at_s: float
    reason: str
    action: str
    excused: str = ""  # the reason why the action was not carried out

    def __str__(self) -> str:
        place = self.where if self.rank is None else f"rank {self.rank}"
        act = "" if self.action in ("none", "alert") else f" -> {self.action}"
        return f"{self.rule}, {place}: {self.verdict}, {self.reason}{f'; {self.excused}' if self.excused else act}"


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log of a failed command: the line with the error, and lines around it.

    Attributes:
        node: the node.
        path: the path of the log.
        error: the line that looks most like the cause; "" if no line looks like an error.
        lines: the lines.
    """

    node: str
    path: str
    error: str
    lines: list[str]

    def __str__(self) -> str:
        cause = [f"the last error on {self.node}: {self.error}"] if self.error else []
        return "\n".join([*cause, f"from {self.path}:", *(f"  {line}" for line in self.lines)])


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of samples: every sample of every committed step must be there exactly once.

    ``missing`` and ``repeated`` name shards of a step; ``skipped`` names skipped steps with their
    shards. ``samples`` counts those of all kept contributions.
    """

    steps: int
    samples: int
    missing: list[str] = []  # e.g. "step 21 shard 2"
    repeated: list[str] = []
    skipped: list[str] = []


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the test that made a run.

    Attributes:
        nodeid: the test, as pytest names it.
        failed: the test failed in its own code, after the run. A failure by the verdict does not
            count.
        message: kind and first line of the error.
    """

    __test__ = False  # pytest must not collect this class

    nodeid: str
    failed: bool = False
    message: str = ""


class Outcome(msgspec.Struct, kw_only=True):
    """The outcome of one run.

    ``settings`` holds the fields of the run's configuration that differ from the default and are
    not fields here. ``account`` says how the run spent its time. It, ``ledger`` and
    ``false_alarms`` are None if they are not known, as for a command. ``claimed`` is False if a
    test judges the run by itself; its verdict then says nothing about recovery. ``session`` names
    the pytest session that made the run, since several may share a report directory.
    ``not_recovered`` is the failed condition of ``assert_recovered``.
    """

    name: str
    job: str
    stack: str = "chaoskit"
    substrate: str
    nodes: int
    spares: int
    seed: int
    reduction: str
    started: str  # wall clock, ISO 8601, for display only
    wall_s: float
    verdict: Verdict
    reasons: list[str]
    steps: list[StepPoint]
    twin_losses: list[float | None] | None = None
    faults: list[FaultRecord] = []
    recoveries: list[Recovery] = []
    exposures: list[Exposure] = []
    copies: CopyInterval | None = None  # None if no replicated state was copied
    rules_fired: list[RuleRecord] = []
    log_ends: list[LogEnd] = []  # of nodes with a failed command
    checks: list[Check] = []
    not_applied: dict[str, str] = {}  # check -> the reason why it does not apply
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
    # by phase, at the end of the run; empty if no limits were known
    hang_limits_ms: dict[str, int] = {}
    run_id: str = ""  # the id in a history; empty outside of pytest
    suspects: int = 0  # ranks that were given up because a phase exceeded its limit
    # at the coordinator, from clients without the token or with another protocol
    refused_connections: int = 0
    test: TestResult | None = None  # None outside of pytest, and until the test is over
    not_recovered: str = ""

    @property
    def came_back(self) -> bool | None:
        """True if the training went on after every incident; None if the run does not show it.

        Other failures of the run, such as different losses, do not count. A run without a loss came
        back if it completed. A run with the verdict unknown or error does not show it.
        """
        if self.verdict not in (Verdict.PASSED, Verdict.FAILED):
            return None
        verdicts = {check.name: check.verdict for check in self.checks}
        verdict = verdicts.get(RECOVERED) or verdicts.get(COMPLETED) or self.verdict
        return {Verdict.PASSED: True, Verdict.FAILED: False}.get(verdict)

    @property
    def recovered(self) -> bool | None:
        """True if the run came back, and ``assert_recovered`` did not fail; None if not known.

        Without a call of ``assert_recovered`` it is the same as :attr:`came_back`.
        """
        return False if self.not_recovered and self.came_back else self.came_back

    @property
    def result(self) -> Verdict:
        """The worse of the verdict and of the test's own result, which reports show."""
        failed = self.test is not None and self.test.failed
        return Verdict.worst([self.verdict, Verdict.FAILED if failed else Verdict.PASSED])

    @property
    def result_reasons(self) -> list[str]:
        """The reasons why the result is not ``passed``; empty if it is."""
        failed = self.test is not None and self.test.failed
        return (
            [*self.reasons, f"the test failed: {self.test.message}"]
            if self.test and failed
            else self.reasons
        )

    @property
    def losses(self) -> list[float | None]:
        """The loss of every finished step; None for a batch that was skipped."""
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
        """Return journal records of the run with these events, ordered by time.

        They are read from the directory of the run, and are empty if that is gone.

        Args:
            events: the names of the events, such as ``"commit"`` and ``"detected"``; without
                names, all records are returned.

        Raises:
            BadInput: for an event that does not exist.
        """
        if unknown := sorted(set(events) - set(Event)):
            raise BadInput("events", unknown[0], name_remedy(unknown[0], sorted(Event)))
        records = read_journals(Path(self.directory) / "journal")
        return [record for record in records if not events or record.event in events]

    @typed_arguments
    def assert_recovered(
        self,
        *,
        within_s: LimitS,
        lost_steps: int = 0,
        false_alarms: int = 0,
        bit_equal: bool = True,
    ) -> None:
        """Assert that the run recovered each time within ``within_s``, and lost nothing else.

        If it fails, the run counts as not recovered in the recovery probability and in a history. A
        run without any recovery fails, too.

        Args:
            within_s: limit of the slowest recovery in seconds, from the fault to the next committed
                step.
            lost_steps: committed steps that may have been computed again.
            false_alarms: detections without a fault that may have happened. An unknown number, as
                for a command, counts as 0.
            bit_equal: losses and final weights equal those of the unbroken run.

        Raises:
            AssertionError: naming what was exceeded, or that the run shows no recovery; with
                ``bit_equal`` also as :meth:`assert_same_losses_as_twin`.
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
        """Raise AssertionError if recoveries, lost steps or false alarms exceed their limits."""
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
        """Assert that losses and final weights equal those of the unbroken run bit for bit.

        Raises:
            AssertionError: naming the first step that differs; also if there is no unbroken run, or
                the number of steps or the final weights differ.
        """
        __tracebackhide__ = True
        if self.twin_losses is None:
            raise AssertionError(
                f"{self.name}: there is no twin to compare with; run with twin=True"
            )
        losses = {point.step: point.loss for point in self.steps}
        for step, twin_loss in enumerate(self.twin_losses):
            loss = losses.get(step)
            if step <= max(losses, default=-1) and repr(loss) != repr(twin_loss):
                raise AssertionError(
                    f"{self.name}: loss of step {step} is {loss!r}, the unbroken run's is {twin_loss!r}"
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
