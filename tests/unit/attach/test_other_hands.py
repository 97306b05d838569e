"""Tests of the hands of other runs in the pods of a job."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.attach.hands.other_hands import earlier_hand, running_hands
from chaoskit.hand import PROGRAM_NAME

RUNNING = {"running": {}}
ENDED = {"terminated": {"exitCode": 0}}


def pod(**states: dict[str, Any]) -> dict[str, Any]:
    """Return a pod with ephemeral containers in this order; underscores are hyphens."""
    names = {name.replace("_", "-"): state for name, state in states.items()}
    return {
        "metadata": {"name": "llama-0"},
        "spec": {"ephemeralContainers": [{"name": name} for name in names]},
        "status": {
            "phase": "Running",
            "ephemeralContainerStatuses": [
                {"name": name, "state": state} for name, state in names.items() if state
            ],
        },
    }


def test_only_running_hands_of_ours_refuse_a_run() -> None:
    states = {"chaoskit_hand_processes_a": ENDED, "debugger_x": RUNNING}
    assert running_hands(pod(**states)) == []
    states["chaoskit_hand_network_a"] = RUNNING
    assert running_hands(pod(**states)) == ["chaoskit-hand-network-a"]
    assert running_hands({"spec": {}, "status": {}}) == []


def hello(own_pid: int, **processes: tuple[int, int]) -> dict[str, Any]:
    """Return the answer of a hand, given the pid and the start time of processes by their letter.

    ``x`` is the training, and the others are hands.
    """
    listed = [
        {"pid": pid, "ticks": ticks, "name": "python3" if letter == "x" else PROGRAM_NAME}
        for letter, (pid, ticks) in processes.items()
    ]
    return {"pid": own_pid, "processes": listed}


def test_only_a_hand_that_began_before_counts() -> None:
    assert earlier_hand(hello(9, x=(1, 50), b=(9, 70))) is None
    assert earlier_hand(hello(9, x=(1, 50), b=(9, 70), a=(12, 71))) is None
    assert earlier_hand(hello(9, x=(1, 50), b=(9, 70), a=(12, 69))) == 12
    assert earlier_hand(hello(9, x=(1, 50), b=(9, 70), a=(8, 70))) == 8, "of one tick"
    assert earlier_hand(hello(9, x=(1, 50))) is None, "a hand that sees no hand"


@given(
    st.permutations(["a", "a", "b", "b"]),
    st.tuples(st.integers(0, 1), st.integers(0, 1)),
    st.permutations([5, 6]),
)
def test_of_two_runs_exactly_one_goes_on(
    turns: list[str], pauses: tuple[int, int], pids: list[int]
) -> None:
    """Each run starts its hand, and looks for an earlier one; in any interleaving.

    Pids may begin again at low numbers, and two starts may fall into one tick of the clock.
    """
    pid_of, pause_of = dict(zip("ab", pids, strict=True)), dict(zip("ab", pauses, strict=True))
    hands: dict[str, tuple[int, int]] = {}
    refused: dict[str, bool] = {}
    now_ticks = 100
    for run in turns:
        if run not in hands:
            now_ticks += pause_of[run] or bool(hands)
            hands[run] = (pid_of[run], now_ticks)
        else:
            refused[run] = earlier_hand(hello(pid_of[run], **hands)) is not None
            if refused[run]:
                hands.pop(run)
                hands[run] = (pid_of[run], now_ticks + 1000)  # it has ended
    assert sorted(refused.values()) == [False, True]
