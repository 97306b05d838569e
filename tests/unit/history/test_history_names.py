"""Names of series and runs of a history: an exact match counts before a prefix and a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import run

from chaoskit.cli.app import run as command
from chaoskit.errors import BadInput
from chaoskit.history.record import SeriesRecord, new_id
from chaoskit.history.session import plan_of_run
from chaoskit.history.store import RunContents, RunHistory, encode
from chaoskit.nightly.report import choose_night
from chaoskit.vocabulary import Verdict

TITLES = {
    "6a66aaaaaaaaaaaa": "test_first.py::test_kill",
    "f7f7aaaaaaaaaaaa": "test_first.py::test_kill_and_nan",
    "e4c1aaaaaaaaaaaa": "test_first.py::test_fails",
    "6a66bbbbbbbbbbbb": "test_first.py::test_overkill[tiny]",
    "abcdaaaaaaaaaaaa": "test_first.py::test_overkill_again[tiny]",
    "0001aaaaaaaaaaaa": "test_first.py::test_twice",
    "0002aaaaaaaaaaaa": "test_first.py::test_twice #2",
    "0003aaaaaaaaaaaa": "chaos/test_other.py::TestOther::test_here[a::b]",
    "0004aaaaaaaaaaaa": "chaos/test_other.py::TestOther::test_here_too",
}


@pytest.fixture
def store(tmp_path: Path) -> str:
    history = RunHistory(str(tmp_path / "history"))
    history.add(new_id(), [run(series=series, title=title) for series, title in TITLES.items()])
    history.close()
    return str(tmp_path / "history")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("test_first.py::test_kill", "test_first.py::test_kill"),
        ("test_kill", "test_first.py::test_kill"),
        ("test_overkill", "test_first.py::test_overkill[tiny]"),
        ("test_overkill[tiny]", "test_first.py::test_overkill[tiny]"),
        ("test_twice", "test_first.py::test_twice"),
        ("test_twice #2", "test_first.py::test_twice #2"),
        ("test_here", "chaos/test_other.py::TestOther::test_here[a::b]"),
        ("6a66aaaaaaaaaaaa", "test_first.py::test_kill"),
        ("6a66a", "test_first.py::test_kill"),
        ("test_kill_", "test_first.py::test_kill_and_nan"),
        ("fail", "test_first.py::test_fails"),
    ],
)
def test_a_series_is_shown_by_its_exact_name_first(
    store: str, name: str, title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["history", "show", store, name, "--json"]) == 0
    assert {shown["title"] for shown in json.loads(capsys.readouterr().out)} == {title}


@pytest.mark.parametrize(
    ("name", "count"), [("6a66", 2), ("test_here", 1), ("kil", 4), ("test_first.py", 7)]
)
def test_a_name_of_several_series_lists_them(
    store: str, name: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status = command(["history", "show", store, name])
    message = capsys.readouterr().err
    assert status == (2 if count > 1 else 0)
    assert sum(series in message for series in TITLES) == (count if count > 1 else 0)


def test_a_misspelt_test_is_guessed(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["history", "show", store, "test_fials"]) == 2
    assert capsys.readouterr().err == "chaoskit: SERIES test_fials: write test_fails\n"


def test_a_series_without_recoveries_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default metric is missing in runs without a loss. A requested metric must exist."""
    store = str(tmp_path / "history")
    history = RunHistory(store)
    failed = run(None, series="aaaa", verdict=Verdict.UNKNOWN)
    history.add(new_id(), [failed])
    history.close()
    assert command(["history", "show", store, "aaaa"]) == 0
    assert failed.run_id in capsys.readouterr().out
    assert command(["history", "show", store, "aaaa", "--metric", "stpe"]) == 2
    assert capsys.readouterr().err == "chaoskit: --metric stpe: write step\n"


def test_a_run_is_replayed_by_its_exact_name_first(tmp_path: Path) -> None:
    """Names of runs that other tools have made may begin alike."""
    runs = [run(run_id="night-1", seed=1), run(run_id="night-10", seed=10)]
    contents = RunContents()
    contents.take(encode([SeriesRecord(series="one", plan={"settings": {}}), *runs]), "a")
    plan = json.loads(plan_of_run(contents, "night-1", tmp_path))
    assert plan["settings"]["seed"] == 1
    with pytest.raises(BadInput, match="several runs match"):
        plan_of_run(contents, "night", tmp_path)


def test_a_night_is_chosen_by_its_exact_name_first() -> None:
    from cli.test_nightly import night

    nights = [night(night="night-1", commit="aa"), night(night="night-10", commit="bb")]
    assert choose_night(nights, "night-1").night == "night-1"
