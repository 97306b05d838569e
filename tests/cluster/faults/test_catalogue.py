"""The catalogue of faults is complete, agrees with the code and with the page, and its examples
run.
"""

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


# -- descriptions of faults ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.__name__)
def test_a_fault_says_everything(kind: type[Fault]) -> None:
    description = entry(kind)
    assert all(description["evidence"].values())
    for name in ("effect", "description", "undo", "substrates", "moments", "example"):
        assert description[name], name
    assert kind.family in FAMILIES
    assert description["stands_for"]
    assert bool(description["counted"]) != bool(description["unlisted"]), (
        "rows of the tables, or why there are none"
    )
    assert not re.search(r"\d", description["stands_for"].replace("rank 0", "")), (
        "numbers stand in faults/incidents.py"
    )
    assert all(parameter["meaning"] for parameter in description["parameters"])


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.__name__)
def test_no_fault_is_built_upon_another(kind: type[Fault]) -> None:
    """All that a fault is can be read in its class, and in the base of all."""
    assert [base for base in kind.__mro__ if issubclass(base, Fault)] == [kind, Fault]


def test_the_tables_add_up() -> None:
    """Counts and shares of the incidents agree with the sums of their sources."""
    llama = [incident for incident in INCIDENTS if incident.study == LLAMA_3]
    assert sum(incident.count for incident in llama) == 419
    assert round(sum(incident.percent for incident in llama), 1) == 94.9
    byte_robust = [incident for incident in INCIDENTS if incident.study == BYTE_ROBUST]
    explicit, implicit = 39_687, 5_506 + 442 + 148
    assert sum(incident.count for incident in byte_robust) == explicit + implicit + 9_582
    for incident in byte_robust:
        if not incident.together:
            assert incident.percent == pytest.approx(
                100 * incident.count / (explicit + implicit + 9_582), abs=0.06
            )


def test_every_incident_has_a_fault_or_says_what_is_missing() -> None:
    stood_for = {row for kind in CATALOGUE for row in kind.counted}
    assert stood_for <= set(INCIDENTS)
    assert not [row.name for row in INCIDENTS if row not in stood_for and not row.missing]


def test_moments_are_those_that_the_checks_allow() -> None:
    """The moments of three faults agree with a list by hand."""
    stop, gil, _ = moments(Hang)
    assert stop.recoveries == ("detection", "regroup", "restore", "recommit")
    assert gil.recoveries == ("restore", "recommit")
    assert "healer" in stop.roles
    assert "healer" not in gil.roles
    assert moments(BadBatch)[0].roles == ()
    activation = next(form for form in moments(NaN) if form.form["where"] == "activation")
    assert (activation.phases, activation.times, activation.recoveries) == (("forward",), True, ())
    assert set(LIVE_ROLES) <= set(moments(Kill)[0].roles)
    assert len(moments_in_words(Hang)) == 2  # two forms share their moments
    (words,) = moments_in_words(Kill)
    assert words.startswith(
        "in forward, backward, reduce, optimizer of a step; at a time; during detection, "
    )


def test_a_fault_is_found_by_its_name() -> None:
    assert find("bitflip").__name__ == "BitFlip"
    with pytest.raises(BadInput, match=r"^name='Explode': use one of Kill, "):
        find("Explode")


# -- the page --------------------------------------------------------------------------------------


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
    here = {fault["name"]: fault["here"] for fault in catalogue()}
    assert here["Kill"] == {"state": "no", "reason": "nobody may be killed here"}
    assert here["Straggle"] == {
        "state": "in part",
        "reason": "not everything: there is no CPU here",
    }
    assert here["OutOfMemory"]["state"] == "in part"
    assert here["Hang"] == {"state": "yes", "reason": ""}


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


# -- its examples ----------------------------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def page_tests(directory: Path) -> dict[str, Callable[[Any], None]]:
    """Return the tests of every block of the page, imported as a module.

    A single line becomes the body of a test, as if pasted there.
    """
    tests: dict[str, Callable[[Any], None]] = {}
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
        tests |= {name: test for name, test in vars(module).items() if name.startswith("test_")}
    return tests


class Planner:
    """A stand-in for the fixture: it plans the runs of a test, with all checks, and runs nothing."""

    def __init__(self) -> None:
        self.planned: list[Experiment] = []

    def run(
        self, job: str, *, faults: Sequence[Fault] = (), twin: bool = True, **plan: Any
    ) -> None:
        self.planned.append(plan_experiment(job, faults=faults, **plan))


def test_every_example_could_be_run(tmp_path: Path) -> None:
    tests = page_tests(tmp_path)
    assert {f"test_{kind.__name__}" for kind in CATALOGUE} < set(tests)
    assert len(tests) >= len(CATALOGUE) + 8
    for name, example in tests.items():
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
    """A stand-in for the fixture: it uses the smallest model unless an example names one."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos

    def run(self, job: str, **plan: Any) -> None:
        outcome = self.chaos.run(job, **{"options": {"size": "tiny"}} | plan)
        assert outcome.verdict == Verdict.PASSED
        assert {fault.state for fault in outcome.faults} == {"confirmed"}


def test_an_example_asks_for_a_substrate_that_can_do_it(tmp_path: Path) -> None:
    tests = page_tests(tmp_path)
    for kind in CATALOGUE:
        substrates = {
            mark.kwargs["substrate"]
            for mark in getattr(tests[f"test_{kind.__name__}"], "pytestmark", ())
        }
        assert (substrates or {"local"}) <= set(kind.substrates)


def test_a_parameter_is_explained_where_it_comes_from() -> None:
    """The meaning of ``heal_after_s`` comes from the base of all faults of the network, two classes
    above.
    """
    meanings = {
        parameter["name"]: parameter["meaning"] for parameter in entry(faults.Delay)["parameters"]
    }
    assert meanings["heal_after_s"] == (
        "seconds after the act at which it ends; None for the end of the run."
    )
    assert meanings["jitter_ms"].startswith("largest difference")


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
    """An example of the guide and two of faults run; tests of the other faults show the rest."""
    page_tests(tmp_path)[name](Tiny(chaos))
