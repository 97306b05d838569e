"""``chaoskit doctor``: which features and faults this machine supports, with reasons and remedies."""

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

#: What silent corruption can change without being noticed, however good the machine is.
NOT_COMPARED = (
    "weights, optimizer state and gradients of sharded jobs without replicas (FSDP); all about it: "
    "chaoskit faults BitFlip"
)

_STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}

app = command_app()


@app.command()
def doctor(machine: Json = False) -> int:
    """Check which features and faults this machine supports.

    It looks, and changes nothing: one child process is started and ends at once.

    Exit code 0: training, recovery and most faults can run here, 1: they cannot.

    Example: [cyan]chaoskit doctor[/]
    """
    findings = examine()
    if machine:
        print_json(plain(findings))
    else:
        console().print(render(findings))
    return 0 if can_run(findings) else EXIT_FAILED


def examine(probes: tuple[Probe, ...] = PROBES) -> list[DoctorFinding]:
    """Ask every probe."""
    findings: list[DoctorFinding] = []
    for probe in probes:
        found = probe()
        findings += found if isinstance(found, list) else [found]
    return findings


def can_run(findings: list[DoctorFinding]) -> bool:
    """Whether nothing of the core is missing."""
    return not any(finding.core and finding.state == "missing" for finding in findings)


def plain(findings: list[DoctorFinding]) -> dict[str, Any]:
    """Return the findings as JSON values."""
    told = [
        {
            "name": one.name,
            "state": one.state,
            "found": one.found,
            "remedy": one.remedy,
            "core": one.core,
        }
        for one in findings
    ]
    faults = {kind.__name__: here(kind) for kind in kinds()}
    return {
        "ok": can_run(findings),
        "findings": told,
        "faults": faults,
        "not_compared": NOT_COMPARED,
    }


def render(findings: list[DoctorFinding]) -> RenderableType:
    """Render the findings as tables."""
    table = _grid()
    for one in findings:
        text = Text(one.found)
        if one.remedy:
            text.append(f"\n→ {one.remedy}", "dim")
        table.add_row(Text(one.state, _STYLES[one.state]), one.name, text)
    limited = _limited()
    faults = Table.grid(padding=(0, 2, 0, 0))
    faults.add_column(no_wrap=True)
    faults.add_column()
    for (state, reason), names in limited.items():
        faults.add_row(
            Text(state, "yellow"), Text.assemble(", ".join(names), (f"\n→ {reason}", "dim"))
        )
    whole = len(kinds()) - sum(map(len, limited.values()))
    blocks: list[RenderableType] = [
        table,
        Text(f"\n{whole} of {len(kinds())} faults can be done here in every form"),
    ]
    blocks += [Padding(faults, (0, 0, 0, 2))] if limited else []
    says = (
        "training and recovery can run here"
        if can_run(findings)
        else "nothing can run here until this is mended"
    )
    lacking = [one.name for one in findings if one.core and one.state == "missing"]
    blocks += [Text(f"not compared on any machine: {NOT_COMPARED}", "dim")]
    return Group(*blocks, Text(": ".join(filter(None, [says, ", ".join(lacking)])), "bold"))


def _limited() -> dict[tuple[str, str], list[str]]:
    """Return the names of faults that cannot be done here in every form, by their state and its reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for kind in kinds():
        ability = here(kind)
        if ability["state"] != "yes":
            names.setdefault((ability["state"], ability["reason"]), []).append(kind.__name__)
    return names


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column()
    return table
