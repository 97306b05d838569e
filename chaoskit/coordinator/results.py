"""Comparison of the weights with which the ranks ended. Pure.

-> coordinator/handlers/on_end.py fails the job. runtime/integrity/ has the checks during training.
"""

from __future__ import annotations

from collections.abc import Collection


class Results:
    """Comparison of the digests with which workers report that they are done: all must be equal."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def note(self, worker: str, digest: str, counted_workers: Collection[str] | None = None) -> str:
        """Note the digest of the weights of ``worker`` after the last step.

        Args:
            counted_workers: the workers with results that count; None for all.

        Returns:
            The reason why the job fails, or "" while all digests that count are equal.
        """
        self._digests[worker] = digest
        counted_digests = {
            name: digest
            for name, digest in self._digests.items()
            if counted_workers is None or name in counted_workers
        }
        if len(set(counted_digests.values())) <= 1:
            return ""
        digests = ", ".join(
            f"{name} {digest[:12]}" for name, digest in sorted(counted_digests.items())
        )
        return (
            f"silent corruption: ranks ended with different weights ({digests}); "
            "it is unknown which of them are right"
        )
