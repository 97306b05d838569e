"""Whether all ranks ended with the same weights. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chaoskit.config import RunConfig


def compared(config: RunConfig, members: Sequence[str]) -> Collection[str] | None:
    """The workers that must end with the same weights; None: all.

    Where the batch follows the world, a worker that left before all had a step took it with another batch than those
    that go on.
    """
    return members if config.follow is not None else None


class Results:
    """Compares the digests with which workers report that they are done."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def note(self, worker: str, digest: str, among: Collection[str] | None = None) -> str:
        """``worker`` has the last step. Returns why the job has failed, or nothing.

        Args:
            among: the workers whose results count; None: all.
        """
        self._digests[worker] = digest
        counted = {
            name: one for name, one in self._digests.items() if among is None or name in among
        }
        if len(set(counted.values())) <= 1:
            return ""
        found = ", ".join(f"{name} {one[:12]}" for name, one in sorted(counted.items()))
        return f"silent corruption: ranks ended with different weights ({found}); nobody can tell whose are right"
