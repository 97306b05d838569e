"""Results of the collectives that user code has called since the last commit. Pure: knows neither tensors nor threads.

A call has a key: the steps that are committed, and its number since that commit. Its result is written down by every
rank that has it, before user code sees it. When a generation begins, the members compare their logs, and those that
lack results take over the longest log. A call whose result some member has is therefore not repeated: that result is
given to all. A call whose result only lost ranks had is made again.
"""

from __future__ import annotations

import hashlib

from chaoskit.errors import BadInput, ChaoskitError

#: Size of all results since one commit.
RESULTS_BYTES_MAX = 64 * 1024


class ResultsDiffer(ChaoskitError):
    """This rank has another result of a call than the other members: it cannot go on with them."""


class CollectiveLog:
    """The log of one rank. What it holds of an earlier step counts as nothing."""

    def __init__(self) -> None:
        self._held: tuple[int, tuple[bytes, ...]] = (
            -1,
            (),
        )  # committed steps, and results: replaced as one
        self._made = (-1, 0)  # committed steps, and calls that user code has had the result of
        self._closed = -1  # committed steps at which this rank makes no more calls

    def results(self, step: int) -> tuple[bytes, ...]:
        """Return the results since the commit of ``step``."""
        at, results = self._held
        return results if at == step else ()

    def made(self, step: int) -> int:
        """Return the number of the next call."""
        at, made = self._made
        return made if at == step else 0

    def replay(self, step: int) -> bytes | None:
        """Return the result of the next call, if it is known: then the call is over. None: it must be made."""
        results, made = self.results(step), self.made(step)
        if made >= len(results):
            return None
        self._made = step, made + 1
        return results[made]

    def record(self, step: int, result: bytes) -> None:
        """Write down the result of the call after the last one. :meth:`replay` gives it.

        Raises:
            BadInput: if the results since the last commit become too large.
        """
        results = (*self.results(step), result)
        if (size := sum(map(len, results))) > RESULTS_BYTES_MAX:
            remedy = f"results between two steps may have {RESULTS_BYTES_MAX} bytes in all: reduce a metric, not data"
            raise BadInput("collective", f"{size} bytes", remedy)
        self._held = step, results

    def adopt(self, step: int, results: tuple[bytes, ...]) -> None:
        """Take over the log of the member that has the longest one.

        Raises:
            ResultsDiffer: if a call has another result here.
        """
        own = self.results(step)
        if results[: len(own)] != own:
            raise ResultsDiffer(
                f"collectives since step {step} have other results on this rank than on the others"
            )
        self._held = step, results

    def close(self, step: int) -> None:
        """The next step begins: no more calls are made before its commit.

        What is held of later steps is dropped: they were lost, and come again with other results.
        """
        self._held, self._made = (step, self.results(step)), (step, self.made(step))
        self._closed = step

    def is_closed(self, step: int) -> bool:
        """Return whether this rank makes no more calls since the commit of ``step``."""
        return self._closed == step

    def digest(self, step: int) -> int:
        """Return 64 bits that tell logs apart; 0 for one without results."""
        results = self.results(step)
        if not results:
            return 0
        mark = hashlib.blake2b(digest_size=8)
        for result in results:
            mark.update(len(result).to_bytes(8, "big") + result)
        return int.from_bytes(mark.digest(), "big")
