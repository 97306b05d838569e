"""Whether all ranks ended with the same weights. Pure."""

from __future__ import annotations


class Results:
    """Compares the digests with which workers report that they are done."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def note(self, worker: str, digest: str) -> str:
        """``worker`` has the last step. Returns why the job has failed, or nothing."""
        self._digests[worker] = digest
        if len(set(self._digests.values())) == 1:
            return ""
        found = ", ".join(f"{name} {one[:12]}" for name, one in sorted(self._digests.items()))
        return f"silent corruption: ranks ended with different weights ({found}); nobody can tell whose are right"
