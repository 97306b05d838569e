"""Counts over many histories: broken laws, and the variety of the histories."""

from __future__ import annotations

from collections import Counter

from simulation.history import History

#: The least share of the histories of each kind in which this must happen. The shares of 500 histories, or of 300
#: sharded ones, are well above.
_LEAST = {
    "replicated": {
        "a coordinator was lost": 1 / 4,
        "three generations": 1 / 6,
        "a network was parted": 1 / 8,
        "a world was resized": 1 / 4,
        "a world came to its size": 1 / 250,
        "a batch followed its world": 1 / 20,
        "every replica was lost": 1 / 100,
    },
    "sharded": {
        "two generations": 1 / 4,
        "a coordinator was lost": 1 / 5,
        "a network was parted": 1 / 10,
        "a world was resized": 1 / 20,
    },
    "kept": {
        "two generations": 1 / 3,
        "steps were lost": 1 / 10,
        "an agent stood still": 1 / 4,
    },
}
#: Committed steps of a sharded job that one generation takes again; a world that grows may take more of them again.
_REPEATED_MAX = 1


def stood_still(history: History) -> bool:
    """Return whether an agent or a whole machine stood still for a while in a history."""
    return any("the agent of" in fault or "the machine of" in fault for fault in history.faults)


class Tally:
    """Counts over histories of one kind.

    Attributes:
        broken: the histories that broke a law.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._count = 0
        self._seen: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._repeated: Counter[int] = Counter()
        self.broken: list[History] = []

    def add(self, history: History) -> None:
        """Count ``history``."""
        self._count += 1
        if history.broken:
            self.broken.append(history)
        end = "done" if history.ok else history.reason.partition(":")[0]
        self._ends[end] += 1
        if not stood_still(history):  # what its node kept grew no newer meanwhile
            self._repeated[history.repeated] += 1
        happened = {
            "a coordinator was lost": history.terms > 1,
            "two generations": history.generations > 1,
            "three generations": history.generations > 2,
            "a network was parted": any(
                "the network is whole again" in fault for fault in history.faults
            ),
            "a world was resized": history.resized > 0,
            "a world came to its size": history.settled,
            "a batch followed its world": history.followed and history.resized > 0,
            "steps were lost": history.repeated > 0,
            "every replica was lost": end == "every replica was lost",
            "an agent stood still": stood_still(history),
        }
        self._seen.update(what for what, is_so in happened.items() if is_so)

    def check_variety(self) -> None:
        """Check that histories are not all alike, nor all harmless.

        Raises:
            AssertionError: if they are.
        """
        count = self._count
        assert 0.8 < self._ends["done"] / count < 0.99, self._ends
        for what, share in _LEAST[self._kind].items():
            assert self._seen[what] > share * count, (
                f"{what} in only {self._seen[what]} of {count} histories"
            )
        if self._kind == "sharded":
            few = sum(self._repeated[steps] for steps in range(_REPEATED_MAX + 1))
            assert few > 0.99 * self._repeated.total(), self._repeated

    def report(self) -> str:
        """Return the broken histories, each with what struck it and an entry for ``known.toml``."""
        return "\n\n".join(self._describe(history) for history in self.broken)

    def _describe(self, history: History) -> str:
        only = f"-k 'one_seed and {self._kind}'"
        rerun = f"CHAOSKIT_SIM_SEED={history.seed} python -m pytest tests/simulation/histories/test_simulation.py {only} -s"
        law = history.broken.replace("\\", "").replace('"', "'")
        entry = f'[[history]]\nkind = "{self._kind}"\nseed = {history.seed}\nlaw = "{law}"\nrepaired = ""'
        return "\n".join([f"seed {history.seed}: {history.broken}", *history.faults, rerun, entry])
