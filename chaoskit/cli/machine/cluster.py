"""``chaoskit cluster``: whether a Kubernetes cluster can have runs, what it needs for them, and what is left there."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from chaoskit.cli.output import EXIT_FAILED, Json, command_app, console, print_json
from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.plaintext import echo
from chaoskit.report.tables import Column, DataTable
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.examination import ClusterFinding, examine_cluster
from chaoskit.substrate.kubernetes.installation import installation, machine_rights
from chaoskit.substrate.kubernetes.nights import NightlyJob, nightly_job
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.session import end_from_outside, find_namespace, started_by

_OK, _LIMITED, _MISSING = ("ok", "green"), ("limited", "yellow"), ("missing", "red")
_JOB, _STEPS = "gpt", 3

app = command_app(
    "Check a Kubernetes cluster, prepare a namespace of it, and end what is left of sessions there."
)


@app.command()
def doctor(
    trial: Annotated[
        bool,
        typer.Option(
            "--trial/--no-trial", help="Run a job of 3 steps on one node, too; it takes about 20 s."
        ),
    ] = True,
    machine: Json = False,
) -> int:
    """Check whether runs can take place on the cluster that the variables CHAOSKIT_KUBERNETES_... name.

    It asks whether the namespace allows runs, and for each right that a session
    needs. Then it runs a small job as pytest would, and removes it.

    Exit code 0: runs can take place there, 1: they cannot.

    Example: [cyan]CHAOSKIT_KUBERNETES_IMAGE=registry/train:1 chaoskit cluster doctor[/]
    """
    options = KubernetesOptions.from_environment(os.environ)
    found = list(examine_cluster(options))
    if trial and all(one.is_there for one in found):
        found += _try()
    if machine:
        findings = [
            {
                "name": one.name,
                "is_there": one.is_there,
                "is_limited": one.is_limited,
                "told": one.told,
            }
            for one in found
        ]
        print_json({"findings": findings})
    else:
        table = Table.grid(padding=(0, 2, 0, 0))
        for one in found:
            table.add_row(Text(*_mark(one)), one.name, one.told)
        console().print(table)
    return 0 if all(one.is_there for one in found) else EXIT_FAILED


def _mark(finding: ClusterFinding) -> tuple[str, str]:
    """Return the state of a finding, and its colour."""
    return _MISSING if not finding.is_there else _LIMITED if finding.is_limited else _OK


def _try() -> list[ClusterFinding]:
    from chaoskit.experiment.harness import Harness  # imports torch

    began_s = time.monotonic()
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            Harness("kubernetes", directory) as harness,
        ):
            outcome = harness.run(_JOB, nodes=1, steps=_STEPS, options={"size": "tiny"}, twin=False)
    except ChaoskitError as error:
        return [_failed_run(str(error))]
    if outcome.reasons:
        return [_failed_run("; ".join(outcome.reasons))]
    return [
        ClusterFinding(
            "a run", f"{_STEPS} steps on one node, in {time.monotonic() - began_s:.0f} s"
        )
    ]


def _failed_run(reason: str) -> ClusterFinding:
    return ClusterFinding(
        "a run", reason, BadInput("job", _JOB, f"have the cluster run it: {reason}")
    )


@app.command("manifests")
def show_manifests(
    namespace: Annotated[str, typer.Option(help="In which runs are to take place.")] = "chaos",
    security: Annotated[
        Literal["restricted", "baseline", "privileged"],
        typer.Option(
            help="The level of Pod Security that it enforces. chaoskit's own pods are restricted."
        ),
    ] = "restricted",
    machines: Annotated[
        bool,
        typer.Option(
            "--machines", help="And a role of the cluster for people that break machines."
        ),
    ] = False,
    nightly: Annotated[
        str,
        typer.Option(
            "--nightly",
            metavar="IMAGE",
            help="And a CronJob of chaoskit nightly run in this image.",
        ),
    ] = "",
) -> None:
    """Print what an administrator makes once, so that others can run with few rights.

    A namespace that allows runs, and in it the service account of drivers, and a
    role for people. It starts nothing. The same lies in deploy/, for kustomize and
    for Helm.

    Example: [cyan]chaoskit cluster manifests --namespace chaos | kubectl apply -f -[/]
    """
    made = [*installation(namespace, security), *([machine_rights()] if machines else [])]
    made += nightly_job(namespace, NightlyJob(nightly)) if nightly else []
    documents = [msgspec.yaml.encode(one).decode() for one in made]
    sys.stdout.write("---\n".join(documents))


@app.command("list")
def list_sessions(machine: Json = False) -> None:
    """List the sessions in the namespace: whose they are, and how many pods each has.

    Example: [cyan]chaoskit cluster list[/]
    """
    with closing(_api()) as api:
        found = _sessions(api)
        if not found:
            with suppress(ApiError):  # it is not for everyone to read namespaces
                find_namespace(api)
        pods = [
            one["metadata"]["labels"].get(manifests.SESSION)
            for one in api.find("Pod", manifests.SESSION)
        ]
    told = [
        {
            "session": name,
            "started_by": one["metadata"].get("annotations", {}).get(manifests.STARTED_BY, ""),
            "since": one["metadata"]["creationTimestamp"],
            "pods": pods.count(name),
        }
        for name, one in found.items()
    ]
    if machine:
        print_json({"sessions": told})
    elif told:
        console().print(render_sessions(told))
    else:
        echo("no sessions")


def render_sessions(sessions: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return a table with a row for each session."""
    names = (Column("session", is_heading=True), Column("pods", is_number=True), Column("since"))
    table = DataTable(*names, Column("started by", is_text=True))
    for session in sessions:
        table.add_row(
            *(str(session[field]) for field in ("session", "pods", "since", "started_by"))
        )
    return table


@app.command("end")
def end_sessions(
    names: Annotated[
        list[str], typer.Argument(metavar="SESSION...", help="As chaoskit cluster list names them.")
    ],
) -> None:
    """End sessions that are left, as of a machine that lost its power: delete all that they have made.

    A session ends by itself when its pytest does. Runs of one that is ended are errors.

    Example: [cyan]chaoskit cluster end chaoskit-1f2e3d4c[/]
    """
    with closing(_api()) as api:
        known = _sessions(api)
        for name in names:
            if name not in known:
                raise BadInput("session", name, "name one that chaoskit cluster list shows")
        for name in names:
            end_from_outside(api, name, started_by())


def _api() -> KubernetesApi:
    options = KubernetesOptions.from_environment(os.environ)
    return KubernetesApi(options.context, options.namespace)


def _sessions(api: KubernetesApi) -> dict[str, Any]:
    return {one["metadata"]["name"]: one for one in api.find("Job", manifests.SESSION)}
