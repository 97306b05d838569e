"""The assignment of runs to experiments, and the parts of a plan that are kept with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.plan.planfile import encode
from chaoskit.history.series import series_of, series_plan
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict
from faults import Fault, Kill

ROOT = Path("/work/project")
PLAN: dict[str, Any] = {
    "version": 2,
    "job": "/work/project/jobs/train.py:main",
    "steps": 20,
    "options": {"size": "tiny"},
    "reference": "off",
    "settings": {"nodes": 4, "seed": 1},
    "faults": [{"kind": "Kill", "rank": 2, "at_step": 8, "phase": "forward", "signum": 9}],
}


def outcome(**more: Any) -> Outcome:
    settings: dict[str, Any] = {
        "substrate": "local",
        "nodes": 4,
        "spares": 1,
        "seed": 1,
        "reduction": "exact",
    } | more
    fixed: dict[str, Any] = {
        "name": "x",
        "job": "x",
        "started": "",
        "wall_s": 1.0,
        "verdict": Verdict.PASSED,
    }
    return Outcome(**fixed, reasons=[], steps=[], ledger=None, lost_steps=0, **settings)


def series(plan: dict[str, Any] = PLAN, root: Path = ROOT, **more: Any) -> str:
    return series_of(outcome(**more), plan, root)


def elsewhere(plan: dict[str, Any], place: str) -> dict[str, Any]:
    return json.loads(json.dumps(plan).replace("/work/project", place))  # type: ignore[no-any-return]


SAME = {
    "another seed": (PLAN | {"settings": {"nodes": 4, "seed": 9}}, {"seed": 9}),
    "another name": (PLAN | {"name": "y"}, {}),
    "another checkout": (elsewhere(PLAN, "/home/ann/project"), {}),
    "a field at its default": (PLAN | {"faults": [{"kind": "Kill", "rank": 2, "at_step": 8}]}, {}),
    "a whole number as a float": (PLAN | {"steps": 20.0}, {}),
    "another order": (dict(reversed(PLAN.items())), {}),
}


@pytest.mark.parametrize(("plan", "more"), SAME.values(), ids=SAME)
def test_runs_of_one_experiment_are_of_one_series(
    plan: dict[str, Any], more: dict[str, Any]
) -> None:
    root = Path("/home/ann/project") if "/home/ann" in str(plan) else ROOT
    assert series(plan, root, **more) == series()


OTHERS = {
    "another step": (PLAN | {"faults": [{"kind": "Kill", "rank": 2, "at_step": 9}]}, {}),
    "another job": (PLAN | {"job": "/work/project/jobs/other.py:main"}, {}),
    "another function": (PLAN | {"job": "/work/project/jobs/train.py:other"}, {}),
    "other options": (PLAN | {"options": {"size": "small"}}, {}),
    "a reference": (PLAN | {"reference": "on"}, {}),
    "another substrate": (PLAN, {"substrate": "netns"}),
    "more nodes": (PLAN, {"nodes": 5}),
    "another setting": (PLAN, {"settings": {"heartbeat_ms": 100}}),
}


@pytest.mark.parametrize(("plan", "more"), OTHERS.values(), ids=OTHERS)
def test_what_was_chosen_otherwise_is_another_series(
    plan: dict[str, Any], more: dict[str, Any]
) -> None:
    assert series(plan, **more) != series()


def test_jobs_outside_of_the_repository_are_told_apart_by_their_contents(tmp_path: Path) -> None:
    """Tests write one job into a directory each."""
    series_by_directory = {}
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
        series_by_directory[name] = series(PLAN | {"job": f"{tmp_path / name / 'train.py'}:main"})
    assert series_by_directory["a"] == series_by_directory["b"] != series_by_directory["c"]


@pytest.mark.parametrize("form", ["{}", "--data={}", "file://{}", "x {}"])
def test_temporary_directories_begin_no_series(form: str, tmp_path: Path) -> None:
    """The place of the directory does not matter."""
    first, second = (
        PLAN | {"options": {"data": form.format(tmp_path / name)}} for name in ("one", "two")
    )
    assert series(first) == series(second)
    assert series(PLAN | {"options": {"data": "s3://bucket/one"}}) != series(
        PLAN | {"options": {"data": "s3://bucket/two"}}
    )


@pytest.mark.parametrize(
    "faults", [[Kill(rank="any", at_step=3)], [Kill(rank="minority", at_step=3)]]
)
def test_a_role_counts_as_it_was_asked_for(faults: list[Fault]) -> None:
    plans = [
        json.loads(encode(plan_experiment("gpt", nodes=4, steps=9, faults=faults, seed=seed)))
        for seed in range(6)
    ]
    assert len({json.dumps(plan["faults"]) for plan in plans}) > 1
    assert len({series(plan) for plan in plans}) == 1
    assert series_plan(plans[0], ROOT)["faults"] == plans[0]["asked"]


def test_secrets_stay_where_they_are() -> None:
    """A history may lie where other users read it."""
    command = [
        "python",
        "train.py",
        "--api-key",
        "s3cr3t",
        "--token=s3cr3t",
        "--steps",
        "5",
        "PASSWORD=s3cr3t",
    ]
    plan = PLAN | {
        "command": command,
        "options": {"wandb_api_key": "s3cr3t", "inner": {"secret": "s3cr3t"}},
    }
    kept = series_plan(plan, ROOT)
    assert "s3cr3t" not in json.dumps(kept)
    assert kept["command"] == [
        "python",
        "train.py",
        "--api-key",
        "***",
        "--token=***",
        "--steps",
        "5",
        "PASSWORD=***",
    ]
    assert series(plan) == series(json.loads(json.dumps(plan).replace("s3cr3t", "rotated")))


def test_files_of_the_repository_are_named_from_its_root() -> None:
    plan = PLAN | {
        "command": ["/work/project/run.sh", "/usr/bin/env"],
        "settings": {"working_directory": "/work/project/a"},
    }
    kept = series_plan(plan, ROOT)
    assert kept["job"] == "jobs/train.py:main"
    assert kept["command"] == ["run.sh", "/usr/bin/env"]
    assert kept["settings"] == {"working_directory": "a"}
