"""Results of the collectives that user code has called since the last commit.

Pure: without tensors and threads. A call has a key: the number of committed steps, and its number
since that commit. Every rank that has the result records it before user code gets it. When a
generation begins, the members compare their logs, and those that lack results take over the longest
log. A call is therefore not repeated if a member has its result. It is made again if only lost
ranks had the result.

-> step/collectives.py computes the results. group/regroup.py passes the longest log on.
"""

from __future__ import annotations

import hashlib

from chaoskit.errors import BadInput, ChaoskitError

#: The largest size of all results since one commit.
RESULTS_BYTES_MAX = 64 * 1024


class ResultsDiffer(ChaoskitError):
    """This rank has another result of a call than the other members.

    It cannot continue with them.
    """


class CollectiveLog:
    """The log of one rank. It has the results since one commit; any others count as missing.

    Recording or adopting results of another step drops those that it has.
    """

    def __init__(self) -> None:
        self._held: tuple[int, tuple[bytes, ...]] = (-1, ())  # committed steps, and results
        self._next_call = (-1, 0)  # committed steps, and number of results that user code has got
        self._closed_step = -1  # committed steps at which this rank makes no more calls

    def results(self, step: int) -> tuple[bytes, ...]:
        """Return the results since the commit of ``step``."""
        at_step, results = self._held
        return results if at_step == step else ()

    def next_call(self, step: int) -> int:
        """Return the number of the next call since the commit of ``step``, from 0."""
        at_step, next_call = self._next_call
        return next_call if at_step == step else 0

    def replay(self, step: int) -> bytes | None:
        """Return the result of the next call, and count the call as made.

        Return None if there is no result yet, so that the call must be made.
        """
        results, next_call = self.results(step), self.next_call(step)
        if next_call >= len(results):
            return None
        self._next_call = step, next_call + 1
        return results[next_call]

    def record(self, step: int, result: bytes) -> None:
        """Record the result of the next call, which :meth:`replay` then returns.

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
            ResultsDiffer: if a call has another result here, or this log is the longer one.
        """
        own_results = self.results(step)
        if results[: len(own_results)] != own_results:
            raise ResultsDiffer(
                f"collectives since step {step} have other results on this rank than on the others"
            )
        self._held = step, results

    def close(self, step: int) -> None:
        """End the calls since the commit of ``step``, as the next step begins.

        Results of other steps are dropped. If those steps are later ones, they were lost, and are
        repeated with other results.
        """
        self._held, self._next_call = (step, self.results(step)), (step, self.next_call(step))
        self._closed_step = step

    def is_closed(self, step: int) -> bool:
        """Return whether this rank makes no more calls since the commit of ``step``."""
        return self._closed_step == step

    def digest(self, step: int) -> int:
        """Return a 64-bit digest of the results since ``step``; 0 for a log without results."""
        results = self.results(step)
        if not results:
            return 0
        hasher = hashlib.blake2b(digest_size=8)
        for result in results:
            hasher.update(len(result).to_bytes(8, "big") + result)
        return int.from_bytes(hasher.digest(), "big")
