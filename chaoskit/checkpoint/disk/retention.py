"""Pure decisions about stored snapshots: which old ones are deleted, and when an upload is due.

-> ``disk/due_steps.py``: after which steps the disk tier stores.
-> ``disk/tier.py`` and ``remote/tier.py``: delete the others. ``daemon/archive.py``: uploads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from chaoskit.errors import BadInput
from chaoskit.typed import convert


class Kept(NamedTuple):
    """A stored snapshot: step, generation and size in bytes. The greater one is the newer one."""

    step: int
    generation: int
    size_bytes: int

    @property
    def age(self) -> tuple[int, int]:
        """Step and generation of the snapshot."""
        return self.step, self.generation


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frequency of snapshots: every so many steps or seconds, or at the earlier of both.

    Args:
        every_steps: due at the multiples of this, and when as many steps have passed; 0 for never
            by steps.
        every_s: due after as many seconds; 0 for never by time. If both are 0, every requested save
            is due.

    Raises:
        BadInput: if an argument is negative or of another type.
    """

    every_steps: int = 0
    every_s: float = 0.0

    def __post_init__(self) -> None:
        _require_not_negative(self)

    def due(self, step: int, last_step: int | None, elapsed_s: float | None) -> bool:
        """Return True if the state after ``step`` is to be stored.

        The step of the newest snapshot itself is due again by time, or if both settings are 0.

        Args:
            last_step: step of the newest snapshot; None if there is none, and any step is due.
            elapsed_s: time since it was stored; None if unknown, which counts as long enough.
        """
        if last_step is None or not (self.every_steps or self.every_s):
            return True
        if self.every_steps and step != last_step:
            passed = step - last_step >= self.every_steps
            if passed or step % self.every_steps == 0:
                return True
        return bool(self.every_s) and (elapsed_s is None or elapsed_s >= self.every_s)


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rule that selects the snapshots that a tier keeps.

    Args:
        keep_last: number of the newest to keep; 0 for all.
        keep_every: also keep those whose step is a multiple of this; 0 for none.
        budget_bytes: size limit of all snapshots together; the oldest go first. The newest, and the
            newest verified one, stay even beyond it. 0 for no limit.

    Raises:
        BadInput: if an argument is negative or of another type.
    """

    keep_last: int = 2
    keep_every: int = 0
    budget_bytes: int = 0

    def __post_init__(self) -> None:
        _require_not_negative(self)

    def doomed(self, present: Iterable[Kept], verified: Collection[tuple[int, int]]) -> list[Kept]:
        """Return the snapshots that may be deleted, the oldest first.

        The newest snapshot, and the newest of the verified ones, are never among them.

        Args:
            present: the stored snapshots.
            verified: step and generation of snapshots whose digests were compared, or that were
                just written.
        """
        newest_first = sorted(present, reverse=True)
        undeletable = {kept.age for kept in newest_first[:1]}
        undeletable |= {
            kept.age for kept in [kept for kept in newest_first if kept.age in verified][:1]
        }
        remaining = []
        for index, kept in enumerate(newest_first):
            is_milestone = self.keep_every and kept.step % self.keep_every == 0
            if (
                kept.age in undeletable
                or is_milestone
                or index < self.keep_last
                or not self.keep_last
            ):
                remaining.append(kept)
        size_bytes = sum(kept.size_bytes for kept in remaining)
        for kept in reversed(newest_first):
            if (
                self.budget_bytes
                and size_bytes > self.budget_bytes
                and kept in remaining
                and kept.age not in undeletable
            ):
                remaining.remove(kept)
                size_bytes -= kept.size_bytes
        return [kept for kept in reversed(newest_first) if kept not in remaining]


def _require_not_negative(settings: Schedule | Retention) -> None:
    """Raise BadInput if a setting is negative or of the wrong type."""
    for field, value in msgspec.structs.asdict(settings).items():
        if convert(field, value, float if field == "every_s" else int) < 0:
            raise BadInput(field, value, "use 0 or more")
