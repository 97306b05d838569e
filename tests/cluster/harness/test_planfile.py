"""Experiments as files: a file that was written is read unchanged, and bad contents are refused
with their place.
"""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chaoskit.errors import BadInput
from chaoskit.experiment.plan import planfile
from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.experiment.plan.planfile import load, save
from chaoskit.pytest_plugin import Chaos
from faults import CATALOGUE, Fault, Kill
from faults.strategies import fault_plans

JOB = f"{Path(__file__).parents[2] / 'jobs' / 'wrong' / 'unfaithful.py'}:faithful"


@given(
    faults=fault_plans(nodes=3, steps=20, parameters=("0.weight",), sure=False),
    chosen=st.fixed_dictionaries(
        {
            "spares": st.integers(0, 2),
            "shards": st.sampled_from((0, 6)),
            "seed": st.integers(0, 2**40),
            "hang_steps": st.floats(1, 1e9),
            "reduction": st.sampled_from(("exact", "fast")),
            "fork": st.booleans(),
            "deadline_s": st.none() | st.floats(1, 1e4) | st.just(math.inf),
            "name": st.text(max_size=9),
        }
    ),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_read_is_what_was_written(
    tmp_path: Path, faults: tuple[Fault, ...], chosen: dict[str, Any]
) -> None:
    experiment = plan_experiment(JOB, nodes=3, steps=20, faults=faults, **chosen)
    assert load(save(experiment, tmp_path / "plan.json")) == experiment


def test_a_reference_job_is_named_not_located(tmp_path: Path) -> None:
    """The file works where chaoskit is installed elsewhere."""
    experiment = plan_experiment(
        "gpt", nodes=2, options={"size": "tiny"}, faults=[Kill(rank=1, at_step=3)]
    )
    path = save(experiment, tmp_path / "plan.json")
    assert load(path) == experiment
    assert json.loads(path.read_text())["job"] == "gpt"


def test_every_field_is_spelled_out(tmp_path: Path) -> None:
    """A plan keeps its meaning when a default changes."""
    experiment = plan_experiment(JOB, nodes=2, steps=9, faults=[Kill(rank=1, at_step=3)])
    written = json.loads(save(experiment, tmp_path / "plan.json").read_text())
    (kill,) = written["faults"]
    assert (
        kill.items()
        >= {"kind": "Kill", "rank": 1, "at_step": 3, "phase": "forward", "signum": 9}.items()
    )
    assert written["settings"]["lease_beats"] == experiment.config.lease_beats


# -- new kinds of faults ---------------------------------------------------------------------------


class Strength(enum.Enum):
    """The strength of an exotic fault."""

    GENTLE = "gentle"
    HARD = "hard"


@dataclass(frozen=True, kw_only=True)
class Exotic(Fault):
    """A fault with every sort of field."""

    strength: Strength
    seconds: float = math.inf
    ranks: tuple[int, ...] = ()
    until: int | None = None
    target: int | str = "any"


@pytest.fixture
def exotic(monkeypatch: pytest.MonkeyPatch) -> Exotic:
    monkeypatch.setattr(planfile, "CATALOGUE", (*CATALOGUE, Exotic))
    return Exotic(rank=0, at_step=1, strength=Strength.HARD, ranks=(1, 2))


def _planned(*faults: Fault) -> Experiment:
    return plan_experiment(JOB, nodes=2, steps=9, faults=faults)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seconds": 0.5},
        {"seconds": -math.inf, "until": 4},
        {"target": 2},
        {"strength": Strength.GENTLE, "ranks": ()},
    ],
)
def test_a_new_kind_needs_no_code_here(
    exotic: Exotic, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Enums, tuples, None and infinity are read back with their types."""
    experiment = _planned(replace(exotic, **changes))
    read = load(save(experiment, tmp_path / "plan.json"))
    assert read == experiment
    assert repr(read.faults) == repr(experiment.faults)  # a tuple, not an equal list


def test_a_value_without_a_json_form_is_refused(exotic: Exotic, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="plain values"):
        save(
            replace(_planned(exotic), faults=(replace(exotic, target=object()),)),
            tmp_path / "plan.json",
        )
    assert not list(tmp_path.iterdir())


# -- what is refused -------------------------------------------------------------------------------

GOOD = {
    "version": 2,
    "job": JOB,
    "steps": 9,
    "settings": {"nodes": 2},
    "faults": [{"kind": "Kill", "rank": 1}],
}
KILL = {"kind": "Kill", "rank": 1, "at_step": 3}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"version": 1}, "version", "version 2"),
        ({"job": "nosuchjob"}, "job", "reference job"),
        ({"job": 3}, "job", "Expected `str`"),
        ({"stepz": 3}, "stepz", "unknown field"),
        ({"steps": 0}, "steps", "1 or more"),
        ({"options": {"width": 3}}, "options.width", "faithful takes steps"),
        ({"deadline_s": "soon"}, "deadline_s", "inf"),
        ({"settings": {"node": 3}}, "settings.node", "write nodes"),
        ({"settings": {"faults": []}}, "settings.faults", "use one of"),
        ({"settings": {"reduction": "roughly"}}, "reduction", "exact, fast"),
        ({"faults": [{}]}, "faults[0].kind", "Kill, Hang"),
        (
            {"faults": [KILL, {**KILL, "kind": "Kil"}]},
            "faults[1].kind",
            "write Kill; chaoskit faults lists all",
        ),
        ({"faults": [{**KILL, "at_stp": 3}]}, "faults[0].at_stp", "at_step"),
        ({"faults": [{**KILL, "rank": [1]}]}, "faults[0].rank", "Expected"),
        ({"faults": [{**KILL, "phase": 3}]}, "faults[0].phase", "Expected"),
        ({"faults": [{"kind": "BitFlip", "rank": 1, "at_step": 3}]}, "faults[0].bit", "no default"),
        ({"faults": [{**KILL, "rank": 2}]}, "rank", "from 0 to 1"),
        ({"faults": [{**KILL, "at_step": 9}]}, "at_step", "from 0 to 8"),
    ],
)
def test_a_bad_plan_is_refused_with_its_place(
    tmp_path: Path, changes: dict[str, Any], field: str, remedy: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**GOOD, "faults": [KILL], **changes}))
    with pytest.raises(BadInput) as refused:
        load(path)
    assert refused.value.field == field
    assert refused.value.remedy.startswith(f"in {path}, ")
    assert remedy in refused.value.remedy


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"version": 1}', '{"version": NaN}', "\udcff"]
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=str(path)):
        load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can be read"):
        load(tmp_path / "plan.json")


# -- plans of runs ---------------------------------------------------------------------------------


def test_a_job_is_looked_up_beside_the_plan(tmp_path: Path) -> None:
    """A plan can be kept with the script that it breaks."""
    script = "def train(trainer, *, steps: int):\n    with trainer.transaction() as step:\n        step.backward(0)\n"
    (tmp_path / "own.py").write_text(script)
    (tmp_path / "plan.json").write_text(json.dumps({**GOOD, "job": "own.py", "faults": [KILL]}))
    assert load(tmp_path / "plan.json").config.job.path == str(tmp_path / "own.py")


@pytest.mark.promise("Every run of the harness leaves its plan beside its journals, as `plan.json`")
def test_every_run_leaves_its_plan(chaos: Chaos) -> None:
    """The plan beside the journals is the experiment that was run."""
    faults = [Kill(rank=1, at_step=3, phase="reduce")]
    outcome = chaos.run(
        "../../jobs/wrong/unfaithful.py:faithful", nodes=2, steps=10, seed=5, faults=faults
    )
    read = load(Path(outcome.directory) / "plan.json")
    assert (read.faults, read.steps, read.config.nodes, read.config.seed) == (
        tuple(faults),
        10,
        2,
        5,
    )
    again = chaos.harness.run_planned(read)
    assert (again.losses, again.weights_digest) == (outcome.losses, outcome.weights_digest)
    assert again.faults[0].state == "confirmed"
