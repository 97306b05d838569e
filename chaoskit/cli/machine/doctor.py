"""``chaoskit doctor``: features and faults that this machine supports, with reasons and remedies.

-> cli/machine/probes.py: the features. faults/describe.py: the support for each fault.
-> cli/machine/node.py: fitness of a node to train, such as its GPUs and disk.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from chaoskit.cli.machine.probes import PROBES, DoctorFinding, Probe
from chaoskit.cli.output import EXIT_FAILED, Json, command_app, console, print_json
from chaoskit.faults.describe import here
from chaoskit.faults.kinds import kinds

#: State that silent corruption can change unnoticed on any machine.
NOT_COMPARED = (
    "weights, optimizer state and gradients of sharded jobs without replicas (FSDP); for details: "
    "chaoskit faults BitFlip"
)

_STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}

app = command_app()


@app.command()
def doctor(is_json: Json = False) -> int:
    """Check which features and faults this machine supports.

    The check changes nothing: the child processes that it starts end at once.

    Exit code 0: training, recovery and most faults can run here, 1: they cannot.

    Example: [cyan]chaoskit doctor[/]
    """
    findings = examine()
    if is_json:
        print_json(plain(findings))
    else:
        console().print(render(findings))
    return 0 if can_run(findings) else EXIT_FAILED


def examine(probes: tuple[Probe, ...] = PROBES) -> list[DoctorFinding]:
    """Run every probe, and return the findings."""
    findings: list[DoctorFinding] = []
    for probe in probes:
        result = probe()
        findings += result if isinstance(result, list) else [result]
    return findings


def can_run(findings: list[DoctorFinding]) -> bool:
    """Return True if no feature is missing that every run needs."""
    return not any(finding.core and finding.state == "missing" for finding in findings)


def plain(findings: list[DoctorFinding]) -> dict[str, Any]:
    """Return the values that ``--json`` prints.

    ``ok``: True if a run is possible here; ``findings``: the findings; ``faults``: name of each
    fault -> its support on this machine; ``not_compared``: state in which no machine notices
    corruption.
    """
    rows = [
        {
            "name": finding.name,
            "state": finding.state,
            "found": finding.found,
            "remedy": finding.remedy,
            "core": finding.core,
        }
        for finding in findings
    ]
    faults = {kind.__name__: here(kind) for kind in kinds()}
    return {
        "ok": can_run(findings),
        "findings": rows,
        "faults": faults,
        "not_compared": NOT_COMPARED,
    }


def render(findings: list[DoctorFinding]) -> RenderableType:
    """Return the findings, the faults with limited support, and the conclusion for a terminal."""
    table = _grid()
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", "dim")
        table.add_row(Text(finding.state, _STYLES[finding.state]), finding.name, text)
    limited = _limited_faults()
    faults = Table.grid(padding=(0, 2, 0, 0))
    faults.add_column(no_wrap=True)
    faults.add_column()
    for (state, reason), names in limited.items():
        faults.add_row(
            Text(state, "yellow"), Text.assemble(", ".join(names), (f"\n→ {reason}", "dim"))
        )
    supported = len(kinds()) - sum(map(len, limited.values()))
    blocks: list[RenderableType] = [
        table,
        Text(f"\n{supported} of {len(kinds())} faults can be injected here in every form"),
    ]
    blocks += [Padding(faults, (0, 0, 0, 2))] if limited else []
    sentence = (
        "training and recovery can run here"
        if can_run(findings)
        else "nothing can run here without these features"
    )
    lacking = [finding.name for finding in findings if finding.core and finding.state == "missing"]
    blocks += [Text(f"not compared on any machine: {NOT_COMPARED}", "dim")]
    return Group(*blocks, Text(": ".join(filter(None, [sentence, ", ".join(lacking)])), "bold"))


def _limited_faults() -> dict[tuple[str, str], list[str]]:
    """Return the faults that this machine cannot inject in every form.

    They are grouped by state and reason.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for kind in kinds():
        ability = here(kind)
        if ability["state"] != "yes":
            names.setdefault((ability["state"], ability["reason"]), []).append(kind.__name__)
    return names


def _grid() -> Table:
    """Return a table of three columns, the last of which is wrapped."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column()
    return table
