"""The page on custom faults: its first example runs unchanged, and its tables are complete."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from chaoskit import Harness, LogPatterns, Outcome, Verdict
from chaoskit.vocabulary import LOSS_CAUSES
from faults import Fault, evidence
from faults.target import Target

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "write-a-fault.md").read_text(
    encoding="utf-8"
)
EXAMPLE = next(re.finditer(r"```python\n(.*?)```", PAGE, re.DOTALL))[1]
STEPS = ["sh", "-c", "for n in 0 1 2 3 4 5 6 7 8 9; do echo step $n; sleep 0.1; done"]
#: What the harness calls, or keeps for itself.
NOT_FOR_FAULTS = {
    *(
        "deliver",
        "offer_hook",
        "tell_exit",
        "end",
        "wake",
        "acts_until_ns",
        "on_note",
        "job_ended",
        "ended_well",
    ),
    *(
        "claims",
        "struck_nodes",
        "left_behind",
        "released",
        "exited_ns",
        "gone_ns",
        "injected_ns",
        "acted_ns",
        "lifted_ns",
    ),
    *("fault_id", "cluster", "channel", "store", "beat", "pongs", "last_word", "waiting"),
    *(
        "unclaim",
        "acts",
        "holding",
        "send",
        "arm",
        "ask_thread",
        "order",
        "release_worker",
        "listen",
    ),
}


def cells(heading: str, column: int = 0) -> set[str]:
    """Return the names in a column of the table below a heading, without arguments and ``await``."""
    _, _, rest = PAGE.partition(f"\n| {heading}")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    quoted = [
        name
        for row in rows
        for name in re.findall(r"`(?:await )?(\w[\w ]*)", row.split("|")[column + 1])
    ]
    return set(quoted)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "test_renice.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("test_renice")
    del sys.modules["test_renice"]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness("local", tmp_path_factory.mktemp("runs")) as harness:
        yield harness


def strike(harness: Harness, fault: Fault) -> Outcome:
    return harness.run(
        command=STEPS, watch=LogPatterns(step=r"step (\d+)"), twin=False, faults=[fault]
    )


def test_the_example_strikes_a_command(harness: Harness, example: ModuleType) -> None:
    outcome = strike(harness, example.Renice(rank=0, at_step=2))
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    (fault,) = outcome.faults
    assert any(
        re.fullmatch(r"pid \d+ has niceness 19", evidence.observed) for evidence in fault.evidence
    )


def test_the_example_without_its_act_is_unknown(
    harness: Harness, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: None)
    outcome = strike(harness, example.Renice(rank=0, at_step=2))
    assert outcome.verdict is Verdict.UNKNOWN
    assert "Renice.inject yielded no Evidence" in outcome.reasons[0]


@pytest.mark.costly
def test_the_example_is_a_whole_test_file(tmp_path: Path) -> None:
    (tmp_path / "test_renice.py").write_text(EXAMPLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nchaos_detection = relaxed\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--chaos-report",
        "report",
    ]
    environment = {
        name: setting for name, setting in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "has niceness 19" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def test_all_that_a_target_offers_is_in_the_table() -> None:
    offered = {
        name for name in (*dir(Target), *Target.__dataclass_fields__) if not name.startswith("_")
    }
    assert cells("of `target`") == offered - NOT_FOR_FAULTS
    assert offered >= NOT_FOR_FAULTS


def test_all_kinds_of_evidence_and_their_fields_are_in_the_table() -> None:
    kinds = {
        name: kind
        for name, kind in vars(evidence).items()
        if isinstance(kind, type)
        and issubclass(kind, evidence.Evidence)
        and not kind.__subclasses__()
    }
    assert cells("evidence, from `faults.evidence`") == set(kinds)
    fields = {field for kind in kinds.values() for field in kind.__struct_fields__}
    of_all = {"subject", "source", "observed_ns", "more"}
    assert fields - of_all <= cells("evidence, from `faults.evidence`", column=2)
    subjects = {kind.__name__ for kind in get_args(evidence.Subject)}
    assert all(f"`{name}`" in PAGE for name in subjects)


def test_all_causes_of_a_loss_are_in_the_table() -> None:
    assert cells("cause |") == LOSS_CAUSES
