"""When a snapshot is due, and which of the old ones are kept: pure decisions, the same for every tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from chaoskit.errors import BadInput
from chaoskit.typed import convert


class Kept(NamedTuple):
    """A snapshot that is there. The larger one is the newer one."""

    step: int
    generation: int
    size_bytes: int

    @property
    def age(self) -> tuple[int, int]:
        return self.step, self.generation


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a tier takes a snapshot: every so many steps, every so many seconds, or whichever comes first.

    Args:
        every_steps: due at the multiples of it, and when as many have passed; 0 for never by steps.
        every_s: due after as many seconds; 0 for never by time. With both 0, each save that is asked for is due.
    """

    every_steps: int = 0
    every_s: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(self)

    def due(self, step: int, last_step: int | None, elapsed_s: float | None) -> bool:
        """Whether the state after ``step`` is to be stored.

        Args:
            last_step: of the newest snapshot; None if there is none.
            elapsed_s: since it was stored; None if that is not known.
        """
        if last_step is None or not (self.every_steps or self.every_s):
            return True
        if self.every_steps and step != last_step:
            passed = step - last_step >= self.every_steps
            if passed or step % self.every_steps == 0:
                return True
        return bool(self.every_s) and (elapsed_s is None or elapsed_s >= self.every_s)


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which snapshots a tier keeps.

    Args:
        keep_last: so many of the newest; 0 for all.
        keep_every: those whose step is a multiple of it, too; 0 for none.
        budget_bytes: no more than this in all, if that leaves the newest one; the oldest go first. 0 for no limit.
    """

    keep_last: int = 2
    keep_every: int = 0
    budget_bytes: int = 0

    def __post_init__(self) -> None:
        _require_positive(self)

    def doomed(self, present: Iterable[Kept], verified: Collection[tuple[int, int]]) -> list[Kept]:
        """What may be deleted, the oldest first. Never the newest one, nor the newest of those known to be whole.

        Args:
            present: the snapshots that are there.
            verified: (step, generation) of those whose digests were compared, or that were written just now.
        """
        newest_first = sorted(present, reverse=True)
        safe = {kept.age for kept in newest_first[:1]}
        safe |= {kept.age for kept in [kept for kept in newest_first if kept.age in verified][:1]}
        staying = []
        for rank, kept in enumerate(newest_first):
            milestone = self.keep_every and kept.step % self.keep_every == 0
            if kept.age in safe or milestone or rank < self.keep_last or not self.keep_last:
                staying.append(kept)
        size_bytes = sum(kept.size_bytes for kept in staying)
        for kept in reversed(newest_first):
            if (
                self.budget_bytes
                and size_bytes > self.budget_bytes
                and kept in staying
                and kept.age not in safe
            ):
                staying.remove(kept)
                size_bytes -= kept.size_bytes
        return [kept for kept in reversed(newest_first) if kept not in staying]


def _require_positive(settings: Schedule | Retention) -> None:
    for field, value in msgspec.structs.asdict(settings).items():
        if convert(field, value, float if field == "every_s" else int) < 0:
            raise BadInput(field, value, "use 0 or more")
