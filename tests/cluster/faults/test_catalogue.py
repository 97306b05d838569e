"""The catalogue: complete, true to the code, the same as the page, and its examples run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from faults_page import render_page

import faults
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Verdict
from faults import CATALOGUE, BadBatch, Fault, Hang, Kill, NaN
from faults.base import FAMILIES, LIVE_ROLES
from faults.describe import catalogue, entry, find, moments_in_words
from faults.incidents import BYTE_ROBUST, INCIDENTS, LLAMA_3
from faults.possible import moments

PAGE = Path(__file__).parents[3] / "docs" / "faults.md"


# -- what faults say of themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.__name__)
def test_a_fault_says_everything(kind: type[Fault]) -> None:
    told = entry(kind)
    assert all(told["evidence"].values())
    for said in ("effect", "description", "undo", "substrates", "moments", "example"):
        assert told[said], said
    assert kind.family in FAMILIES
    assert told["stands_for"]
    assert bool(told["counted"]) != bool(told["unlisted"]), (
        "rows of the tables, or why there are none"
    )
    assert not re.search(r"\d", told["stands_for"].replace("rank 0", "")), (
        "numbers stand in faults/incidents.py"
    )
    assert all(one["meaning"] for one in told["parameters"])


def test_the_tables_add_up() -> None:
    """The counts and shares that the sources print, by the sums that they print or that follow from them."""
    llama = [one for one in INCIDENTS if one.study == LLAMA_3]
    assert sum(one.count for one in llama) == 419
    assert round(sum(one.percent for one in llama), 1) == 94.9
    byte_robust = [one for one in INCIDENTS if one.study == BYTE_ROBUST]
    explicit, implicit = 39_687, 5_506 + 442 + 148
    assert sum(one.count for one in byte_robust) == explicit + implicit + 9_582
    for one in byte_robust:
        if not one.together:
            assert one.percent == pytest.approx(
                100 * one.count / (explicit + implicit + 9_582), abs=0.06
            )


def test_every_incident_has_a_fault_or_says_what_is_missing() -> None:
    stood_for = {row for kind in CATALOGUE for row in kind.counted}
    assert stood_for <= set(INCIDENTS)
    assert not [row.name for row in INCIDENTS if row not in stood_for and not row.missing]


def test_moments_are_those_that_the_checks_allow() -> None:
    """Of three faults, by hand."""
    stop, gil, _ = moments(Hang)
    assert stop.recoveries == ("detection", "regroup", "restore", "recommit")
    assert gil.recoveries == ("restore", "recommit")
    assert "healer" in stop.roles
    assert "healer" not in gil.roles
    assert moments(BadBatch)[0].roles == ()
    activation = next(one for one in moments(NaN) if one.form["where"] == "activation")
    assert (activation.phases, activation.times, activation.recoveries) == (("forward",), True, ())
    assert set(LIVE_ROLES) <= set(moments(Kill)[0].roles)
    assert len(moments_in_words(Hang)) == 2  # two forms share theirs
    (said,) = moments_in_words(Kill)
    assert said.startswith(
        "in forward, backward, reduce, optimizer of a step; at a time; during detection, "
    )


def test_a_fault_is_found_by_its_name() -> None:
    assert find("bitflip").__name__ == "BitFlip"
    with pytest.raises(BadInput, match=r"^name='Explode': use one of Kill, "):
        find("Explode")


# -- the page -----------------------------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    """`python docs/generate/faults_page.py > docs/faults.md` repairs it."""
    assert PAGE.read_text() == render_page()


def test_the_page_is_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.Straggle, "restricted", lambda: "everything: there is no CPU here")
    monkeypatch.setattr(faults.Kill, "unavailable", lambda: "nobody may be killed here")
    monkeypatch.setattr(
        "faults.processes.memory.unavailable", lambda controller: f"no {controller}"
    )
    assert PAGE.read_text() == render_page()
    told = {one["name"]: one["here"] for one in catalogue()}
    assert told["Kill"] == {"state": "no", "reason": "nobody may be killed here"}
    assert told["Straggle"] == {
        "state": "in part",
        "reason": "not everything: there is no CPU here",
    }
    assert told["OutOfMemory"]["state"] == "in part"
    assert told["Hang"] == {"state": "yes", "reason": ""}


def test_links_of_the_page_lead_somewhere() -> None:
    text = PAGE.read_text()
    headings = {
        line.lstrip("# ").lower().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    links = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert len(links) > 10
    assert links <= headings


# -- its examples -------------------------------------------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def page_tests(directory: Path) -> dict[str, Callable[[Any], None]]:
    """The tests of every block, imported as a module; a line alone becomes the body of a test, as if pasted there."""
    found: dict[str, Callable[[Any], None]] = {}
    for number, block in enumerate(blocks()):
        code = block
        if isinstance(ast.parse(block).body[0], ast.Expr):
            kind = re.findall(r"faults=\[(\w+)\(", block)[0]
            code = f"from faults import *\n\n\ndef test_{kind}(chaos):\n    {block}"
        path = directory / f"block_{number}.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {name: thing for name, thing in vars(module).items() if name.startswith("test_")}
    return found


class Planner:
    """Takes the place of the fixture: plans what a test would run, with all checks, and runs nothing."""

    def __init__(self) -> None:
        self.planned: list[Experiment] = []

    def run(
        self, job: str, *, faults: Sequence[Fault] = (), twin: bool = True, **plan: Any
    ) -> None:
        self.planned.append(plan_experiment(job, faults=faults, **plan))


def test_every_example_could_be_run(tmp_path: Path) -> None:
    found = page_tests(tmp_path)
    assert {f"test_{kind.__name__}" for kind in CATALOGUE} < set(found)
    assert len(found) >= len(CATALOGUE) + 8
    for name, example in found.items():
        planner = Planner()
        code = inspect.getsource(example)
        if any(
            kind.unavailable() for kind in CATALOGUE if re.search(rf"\b{kind.__name__}\(", code)
        ):
            continue  # the plan would be refused on this machine
        example(planner)
        assert planner.planned, name
        assert all(experiment.faults for experiment in planner.planned), name


class Tiny:
    """The fixture, with the smallest model unless an example names one."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos

    def run(self, job: str, **plan: Any) -> None:
        outcome = self.chaos.run(job, **{"options": {"size": "tiny"}} | plan)
        assert outcome.verdict == Verdict.PASSED
        assert {one.state for one in outcome.faults} == {"confirmed"}


def test_an_example_asks_for_a_substrate_that_can_do_it(tmp_path: Path) -> None:
    found = page_tests(tmp_path)
    for kind in CATALOGUE:
        asked = {
            mark.kwargs["substrate"]
            for mark in getattr(found[f"test_{kind.__name__}"], "pytestmark", ())
        }
        assert (asked or {"local"}) <= set(kind.substrates)


def test_a_parameter_is_explained_where_it_comes_from() -> None:
    """``heal_after_s`` is explained by the base of all faults of the network, two classes above."""
    told = {one["name"]: one["meaning"] for one in entry(faults.Delay)["parameters"]}
    assert told["heal_after_s"] == "when it ends; None: with the run."
    assert told["jitter_ms"].startswith("drawn evenly")


@pytest.mark.slow(name="test_the_replacement_dies_while_it_takes_over_the_state")
@pytest.mark.promise(
    "Phases of a recovery are where recoveries break.",
    name="test_the_replacement_dies_while_it_takes_over_the_state",
)
@pytest.mark.promise(
    "checksums differ between ranks (an audit, for a gradient); the corrupt rank is named and replaced",
    name="test_BitFlip",
)
@pytest.mark.parametrize(
    "name",
    [
        "test_the_replacement_dies_while_it_takes_over_the_state",
        "test_BitFlip",
        pytest.param("test_Cut", marks=pytest.mark.chaos(substrate="netns")),
    ],
)
def test_an_example_runs(chaos: Chaos, tmp_path: Path, name: str) -> None:
    """One of the guide, two of faults. What the others promise, tests of their faults show."""
    page_tests(tmp_path)[name](Tiny(chaos))
