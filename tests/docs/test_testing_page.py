"""The page on tests names the arguments of ``chaos.run`` and the attributes of an outcome, and no
others.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from chaoskit import Chaos, Harness, Outcome, RunConfig
from chaoskit.experiment.plan.command_plan import plan_command
from chaoskit.experiment.plan.plan import plan_experiment

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
#: Fields of an outcome that serve reports, and say nothing that a test would ask.
OF_REPORTS = {
    *(
        "claimed",
        "copies",
        "environment",
        "hang_limits_ms",
        "job",
        "ledger",
        "name",
        "nodes",
        "not_recovered",
    ),
    *(
        "reduction",
        "refused_connections",
        "result",
        "result_reasons",
        "run_id",
        "seed",
        "session",
        "settings",
    ),
    *(
        "spares",
        "stack",
        "started",
        "substrate",
        "suspects",
        "test",
        "twin_weights_digest",
        "wall_s",
    ),
    "weights_digest",
}


def first_column(heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def parameters(*callables: object) -> set[str]:
    """Return the names of all parameters, apart from ``self`` and those that collect others."""
    collected = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name
        for function in callables
        for name, parameter in inspect.signature(function).parameters.items()  # type: ignore[arg-type]
        if parameter.kind not in collected and name != "self"
    }


def test_the_page_has_every_argument_of_a_run() -> None:
    arguments = parameters(Chaos.run, Harness.run, plan_experiment, plan_command)
    settings = set(RunConfig.__struct_fields__)
    named = first_column("Arguments of `chaos.run`")
    assert arguments - named == set()
    assert named - arguments - settings == set()


def test_the_page_has_what_a_test_asks_an_outcome() -> None:
    has = {name for name in dir(Outcome) if not name.startswith("_")} - OF_REPORTS
    assert first_column("What an outcome has") == has
