"""What is kept of a run, and what can be asked of it at any time."""

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
    """What the training does as a whole."""

    STARTING = auto()
    TRAINING = auto()
    BROKEN = auto()  # until the first good step
    OVER = auto()


class Books:
    """What :class:`Accountant` writes into.

    Attributes:
        setbacks: all that training came back from, planned ones too, by time.
        open: the one that it has not come back from.
        losses: ranks lost, by cause.
        formed_ns: when the first group of ranks could be used.
        ended_ns: when the job ended.
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
        self._phase = "quiesced"  # of the recovery that goes on
        self._cause = parts.UNEXPLAINED  # of the newest setback
        self._failures = 0

    @property
    def started_ns(self) -> int | None:
        """Of the run; None while nothing is known."""
        return self._spending.started_ns if self._spending is not None else None

    @property
    def step(self) -> int:
        """Of the newest commit; -1 before it."""
        return self._steps.step

    @property
    def generation(self) -> int:
        """Of the newest commit; 0 before it."""
        return self._steps.generation

    @property
    def world(self) -> int:
        """Ranks of the newest commit; 0 before it."""
        return self._steps.world

    @property
    def full_world(self) -> int:
        """Ranks of the full world; 0 while nobody knows."""
        return self._steps.full_world

    @property
    def loss(self) -> float | None:
        """Of the newest commit."""
        return self._steps.loss

    @property
    def spares(self) -> int:
        """How many there shall be."""
        return self._healing.spares

    @property
    def spares_ready(self) -> int:
        """Warm workers without a rank."""
        return len(self._healing.ready)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the last steps; None before there are some."""
        usual_ns = self._steps.usual_ns
        return None if usual_ns is None else usual_ns / 1e9

    def account(self, now_ns: int | None = None) -> TimeAccount:
        """Up to ``now_ns``, or up to the newest record. Can be asked again and again."""
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
        """The ratios of the last ``window_s`` seconds before ``now_ns``, an hour at most; to the second."""
        spent = Counter[Purpose]()
        if self._spending is not None:
            spent = self._spending.since(now_ns - int(window_s * 1e9))
            spent.update(self._unspent(now_ns, int(window_s * 1e9)))
        return recently_of(spent)

    def _unspent(self, now_ns: int | None, most_ns: int | None = None) -> dict[Purpose, int]:
        """What the time since the last event would be spent on."""
        if now_ns is None or self._spending is None or now_ns <= self._spending.cursor_ns:
            return {}
        unspent_ns = now_ns - self._spending.cursor_ns
        return {self._standing(): unspent_ns if most_ns is None else min(unspent_ns, most_ns)}

    def _standing(self) -> Purpose:
        """What time is spent on while nothing happens."""
        match self._mode:
            case Mode.STARTING:
                waits = bool(self._healing.ready) and not self._healing.members
                return (parts.WAITING, parts.WAITING) if waits else (parts.START_UP, parts.START_UP)
            case Mode.TRAINING:
                return parts.IN_FLIGHT, parts.IN_FLIGHT
            case Mode.BROKEN:
                return self._phase, self._cause
            case Mode.OVER:
                return parts.CLOSING, parts.CLOSING
