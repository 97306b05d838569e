"""The state of an account, and its values at any time.

-> runlog/account/accountant.py updates it. runlog/account/time_account.py: the ratios.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum, auto

from chaoskit.runlog.account import time_account as parts
from chaoskit.runlog.account.healing import Healing
from chaoskit.runlog.account.setback import Setback
from chaoskit.runlog.account.spending import Purpose, Spending
from chaoskit.runlog.account.steps import Steps
from chaoskit.runlog.account.time_account import Recently, TimeAccount, account_of, recently_of


class Mode(Enum):
    """The state of the training as a whole."""

    STARTING = auto()
    TRAINING = auto()
    BROKEN = auto()  # until the first good step
    OVER = auto()


class Books:
    """The state that :class:`Accountant` updates.

    Attributes:
        setbacks: all setbacks that the training recovered from, planned ones too, by time.
        open: the setback that it has not recovered from, or None.
        losses: cause -> the number of lost ranks.
        formed_ns: when the first group of ranks could be used; None before.
        ended_ns: when the job ended; None before.
    """

    def __init__(
        self, started_ns: int | None, full_world: int, spares: int, on_step: Callable[[int], None]
    ) -> None:
        self.setbacks: list[Setback] = []
        self.open: Setback | None = None
        self.losses: Counter[str] = Counter()
        self.formed_ns: int | None = None
        self.ended_ns: int | None = None
        self._spending = Spending(started_ns) if started_ns is not None else None
        self._steps = Steps(full_world, on_step)
        self._healing = Healing(spares)
        self._mode = Mode.STARTING
        self._phase = "quiesced"  # phase of the current recovery
        self._cause = parts.UNEXPLAINED  # cause of the newest setback
        self._failures = 0

    @property
    def started_ns(self) -> int | None:
        """The start of the run in ns; None while there is no record."""
        return self._spending.started_ns if self._spending is not None else None

    @property
    def step(self) -> int:
        """The highest step that was committed or skipped; -1 before the first."""
        return self._steps.step

    @property
    def generation(self) -> int:
        """The generation of the newest step, committed or skipped; 0 before the first."""
        return self._steps.generation

    @property
    def world(self) -> int:
        """The number of ranks of the newest step, committed or skipped; 0 before the first."""
        return self._steps.world

    @property
    def full_world(self) -> int:
        """The number of ranks of the full world; 0 while it is not known."""
        return self._steps.full_world

    @property
    def loss(self) -> float | None:
        """The loss of the newest committed step; None before the first, or if it was null."""
        return self._steps.loss

    @property
    def spares(self) -> int:
        """The number of spares that the run asks for."""
        return self._healing.spares

    @property
    def spares_ready(self) -> int:
        """The number of warm workers without a rank."""
        return len(self._healing.ready_spares)

    @property
    def usual_step_s(self) -> float | None:
        """The median duration of the last 32 usual steps in seconds; None before there are any."""
        usual_ns = self._steps.usual_ns
        return None if usual_ns is None else usual_ns / 1e9

    def account(self, now_ns: int | None = None) -> TimeAccount:
        """Return the account up to ``now_ns``, or with None as far as records account for time.

        It changes nothing, so it may be called again and again. Time since the newest event is
        counted by the state of the training: in flight, in recovery, starting or closing.
        """
        spent = Counter(self._spending.total) if self._spending is not None else Counter[Purpose]()
        spent.update(self._unspent(now_ns))
        return account_of(
            spent,
            degraded_ns=self._steps.degraded_ns,
            missing_ns=self._steps.missing_ns,
            failures=self._failures,
            steps=self.step + 1,
        )

    def recently(self, window_s: float, now_ns: int) -> Recently:
        """Return the ratios of the last ``window_s`` seconds before ``now_ns``, at most an hour.

        Without any record they are those of no time: 0.
        """
        spent = Counter[Purpose]()
        if self._spending is not None:
            spent = self._spending.since(now_ns - int(window_s * 1e9))
            spent.update(self._unspent(now_ns, int(window_s * 1e9)))
        return recently_of(spent)

    def _unspent(self, now_ns: int | None, limit_ns: int | None = None) -> dict[Purpose, int]:
        """Return the time since the last event under the purpose that it would be spent on.

        Args:
            now_ns: the time up to which it counts; None for none.
            limit_ns: the limit of the result; None for no limit.
        """
        if now_ns is None or self._spending is None or now_ns <= self._spending.cursor_ns:
            return {}
        unspent_ns = now_ns - self._spending.cursor_ns
        return {
            self._current_part_and_cause(): unspent_ns
            if limit_ns is None
            else min(unspent_ns, limit_ns)
        }

    def _current_part_and_cause(self) -> Purpose:
        """Return the purpose of time while nothing happens."""
        match self._mode:
            case Mode.STARTING:
                is_waiting = bool(self._healing.ready_spares) and not self._healing.members
                return (
                    (parts.WAITING, parts.WAITING)
                    if is_waiting
                    else (parts.START_UP, parts.START_UP)
                )
            case Mode.TRAINING:
                return parts.IN_FLIGHT, parts.IN_FLIGHT
            case Mode.BROKEN:
                return self._phase, self._cause
            case Mode.OVER:
                return parts.CLOSING, parts.CLOSING
