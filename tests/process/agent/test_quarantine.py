"""Tests of decisions from findings, and of the list of nodes that are kept out: laws, and
concurrent processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from chaoskit.errors import BadInput
from chaoskit.health import Finding, NodeStanding, Quarantine, decide
from chaoskit.health.verdict import describe

findings = st.builds(
    Finding,
    what=st.sampled_from(["gpu0.xid", "disk.free_bytes", "pair.rtt_ms"]),
    severity=st.sampled_from(["ok", "warn", "bad"]),
    value=st.floats() | st.text(max_size=5),
    limit=st.floats(allow_nan=False) | st.just(""),
    detail=st.text(max_size=5),
)


@given(st.lists(findings, max_size=8))
def test_one_bad_finding_refuses_and_nothing_else_does(found: list[Finding]) -> None:
    verdict = decide("n", found)
    severities = {finding.severity for finding in found}
    assert verdict.refused == ("bad" in severities) == bool(verdict.exit_code)
    assert (verdict.standing == NodeStanding.WARNED) == (
        severities >= {"warn"} and "bad" not in severities
    )
    worst = "bad" if "bad" in severities else "warn"
    assert verdict.reasons == tuple(
        describe(finding) for finding in found if finding.severity == worst
    )
    assert bool(verdict.reasons) == (verdict.standing != NodeStanding.ADMITTED), (
        "the reasons are always named"
    )


def test_a_reason_says_what_it_was_compared_with() -> None:
    assert (
        describe(Finding("disk.free_bytes", "bad", 12345.0, 2e9))
        == "disk.free_bytes=12345, limit 2000000000"
    )
    assert describe(Finding("gpu0.xid", "bad", 79.0, "", "fell off")) == "gpu0.xid=79: fell off"


# -- the list --------------------------------------------------------------------------------------


def test_kept_out_released_and_proved(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "state")
    assert quarantine.entries() == []
    assert not (tmp_path / "state").exists(), "looking writes nothing"
    quarantine.add("n1", "falls off the bus", ["XID 79"], by="me")
    assert (quarantine.kept_out(), quarantine.on_probation()) == (("n1",), ())
    assert not quarantine.prove("n1"), "a person must release it first"
    released = quarantine.release("n1", "GPU replaced", by="you")
    assert (released.reason, released.by, released.released_by, released.released_because) == (
        "falls off the bus",
        "me",
        "you",
        "GPU replaced",
    )
    assert (quarantine.kept_out(), quarantine.on_probation()) == ((), ("n1",))
    assert quarantine.prove("n1")
    assert (quarantine.entries(), quarantine.prove("n1")) == ([], False)


def test_evidence_is_added_and_the_first_reason_stays(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    first = quarantine.add("n1", "hot", ["91 C"], by="me")
    second = quarantine.add("n1", "hot again", ["91 C", "93 C"])
    assert second == type(first)(
        node="n1", reason="hot", since=first.since, by="me", evidence=("91 C", "93 C")
    )


def test_one_that_fails_on_probation_is_kept_out_again(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.add("n1", "hot", ["91 C"])
    quarantine.release("n1", "fan replaced")
    again = quarantine.add("n1", "hot after all", ["95 C"])
    assert (again.reason, again.evidence, again.on_probation) == (
        "hot after all",
        ("91 C", "95 C"),
        False,
    )
    assert quarantine.kept_out() == ("n1",)


@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda quarantine: quarantine.add("", "why"), "node"),
        (lambda quarantine: quarantine.add("n1", " "), "reason"),
        (lambda quarantine: quarantine.release("n1", ""), "reason"),
        (lambda quarantine: quarantine.release("nobody", "why"), "node"),
    ],
)
def test_bad_input_changes_nothing(act: object, field: str, tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.add("n1", "hot")
    before = quarantine.path.read_bytes()
    assert callable(act)
    with pytest.raises(BadInput) as refused:
        act(quarantine)
    assert refused.value.field == field
    assert quarantine.path.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["", "{", '{"version": 1, "entries": [1]}', '{"version": 2}', '{"more": 1}']
)
def test_a_damaged_list_lets_nobody_in(content: str, tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.path.write_text(content)
    for act in (
        quarantine.kept_out,
        lambda: quarantine.add("n1", "why"),
        lambda: quarantine.prove("n1"),
    ):
        with pytest.raises(BadInput) as refused:
            act()
        assert refused.value.field == "quarantine"
    assert quarantine.path.read_text() == content


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as refused:
        Quarantine(tmp_path / "file" / "state").add("n1", "why")
    assert refused.value.field == "quarantine"


_ADDS = """
import sys
from pathlib import Path
from chaoskit.health import Quarantine
quarantine = Quarantine(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    quarantine.add(f"{sys.argv[2]}-{number}", "why")
    print(number, flush=True)
"""


def test_several_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", _ADDS, str(tmp_path), name, "25"] for name in "abcd"]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait() for process in running] == [0] * 4
    assert set(Quarantine(tmp_path).kept_out()) == {
        f"{name}-{number}" for name in "abcd" for number in range(25)
    }


def test_a_process_that_is_killed_leaves_a_whole_list(tmp_path: Path) -> None:
    """Reported nodes are in the list, an unfinished one may be, and the next process can
    continue.
    """
    command = [sys.executable, "-c", _ADDS, str(tmp_path), "a", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        numbers = [int(process.stdout.readline()) for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        numbers += [int(line) for line in process.stdout if line.endswith("\n")]
    quarantine = Quarantine(tmp_path)
    assert set(quarantine.kept_out()) >= {f"a-{number}" for number in numbers}
    quarantine.add("b", "the lock has ended with it")
    assert "b" in quarantine.kept_out()


class Laws(RuleBasedStateMachine):
    """A comparison of the quarantine with a dictionary: the nodes kept out, and those on
    probation.
    """

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.quarantine = Quarantine(self.directory)
        self.quarantine.path.unlink(missing_ok=True)
        self.model: dict[str, bool] = {}  # node -> True if it is released

    @rule(node=st.sampled_from("abc"))
    def add(self, node: str) -> None:
        self.quarantine.add(node, "why")
        self.model[node] = False

    @rule(node=st.sampled_from("abc"))
    def release(self, node: str) -> None:
        if self.model.get(node) is False:
            self.quarantine.release(node, "mended")
            self.model[node] = True
        else:
            with pytest.raises(BadInput):
                self.quarantine.release(node, "mended")

    @rule(node=st.sampled_from("abc"))
    def prove(self, node: str) -> None:
        assert self.quarantine.prove(node) == (self.model.get(node) is True)
        if self.model.get(node):
            del self.model[node]

    @invariant()
    def the_list_is_the_model(self) -> None:
        fresh = Quarantine(self.directory)
        assert set(fresh.kept_out()) == {
            node for node, released in self.model.items() if not released
        }
        assert set(fresh.on_probation()) == {
            node for node, released in self.model.items() if released
        }


def test_laws_of_the_list(tmp_path: Path) -> None:
    run_state_machine_as_test(type("LawsHere", (Laws,), {"directory": tmp_path}))
