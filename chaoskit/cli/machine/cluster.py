"""``chaoskit cluster``: check a Kubernetes cluster, prepare it, show its jobs, and end sessions.

-> attach/preview.py: jobs that run already. attach/doctor/: trials of hands.
substrate/kubernetes/examination.py: the checks of a cluster.
substrate/kubernetes/session.py: the end of a session. substrate/kubernetes/installation.py: the
manifests.
"""

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

from chaoskit.attach.doctor.doctor import HandFinding, examine_hands
from chaoskit.attach.hands.hand_container import HAND_ROLES
from chaoskit.attach.hands.image_file import read_hand_image
from chaoskit.attach.preview import JobPreview, preview_job
from chaoskit.cli.output import EXIT_FAILED, Json, command_app, console, print_json
from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.plaintext import echo
from chaoskit.report.tables import Column, DataTable
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.examination import ClusterFinding, examine_cluster
from chaoskit.substrate.kubernetes.installation import attach_roles, installation, machine_rights
from chaoskit.substrate.kubernetes.nights import NightlyJob, nightly_job
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.session import end_from_outside, find_namespace, started_by

_OK, _LIMITED, _MISSING = ("ok", "green"), ("limited", "yellow"), ("missing", "red")
_JOB, _STEPS = "gpt", 3

HandImageName = Annotated[
    str,
    typer.Option(
        metavar="IMAGE",
        envvar="CHAOSKIT_HAND_IMAGE",
        help="Image of hands: docker build --target hand; or a YAML file with its name, command and mounts.",
    ),
]

app = command_app(
    "Check a Kubernetes cluster, prepare a namespace for runs, and end leftover sessions."
)


@app.command()
def doctor(
    attach: Annotated[
        str,
        typer.Option(
            metavar="KIND/NAME",
            help="Only try each hand, on a throw-away pod that is like a pod of this job.",
        ),
    ] = "",
    hand_image: HandImageName = "",
    namespace: Annotated[
        str, typer.Option(help="Namespace of the job of --attach. Default: that of the variables.")
    ] = "",
    container: Annotated[
        str, typer.Option(help="Container that trains, if a pod of this job has several.")
    ] = "",
    trial: Annotated[
        bool,
        typer.Option(
            "--trial/--no-trial",
            help="Also run a job of 3 steps on one node, which takes about 20 s.",
        ),
    ] = True,
    is_json: Json = False,
) -> int:
    """Check if runs are possible on the cluster that the variables CHAOSKIT_KUBERNETES_... name.

    The check covers the permission of the namespace, and each right that a session needs. Then a
    small job is run as pytest would run it, and removed.

    With --attach it tries the hands for faults in a job that runs already: one stops a process, one
    drops packets. Both act in a pod of their own, which is deleted at once.

    Exit code 0: runs are possible, and all hands work, 1: they are not, 2: bad input.

    Example: [cyan]CHAOSKIT_KUBERNETES_IMAGE=registry/train:1 chaoskit cluster doctor[/]
    """
    options = KubernetesOptions.from_environment(os.environ)
    if attach:
        return _examine_hands(options, attach, hand_image, namespace, container, is_json)
    if namespace or container:
        field, value = ("namespace", namespace) if namespace else ("container", container)
        raise BadInput(field, value, "give it together with --attach KIND/NAME")
    results = list(examine_cluster(options))
    if trial and all(result.is_there for result in results):
        results += _run_trial()
    if is_json:
        findings = [
            {
                "name": result.name,
                "is_there": result.is_there,
                "is_limited": result.is_limited,
                "told": result.text,
            }
            for result in results
        ]
        print_json({"findings": findings})
    else:
        table = Table.grid(padding=(0, 2, 0, 0))
        for result in results:
            table.add_row(Text(*_mark(result)), result.name, result.text)
        console().print(table)
    return 0 if all(result.is_there for result in results) else EXIT_FAILED


def _examine_hands(
    options: KubernetesOptions,
    job: str,
    image: str,
    namespace: str,
    container: str,
    is_json: bool,
) -> int:
    """Try each hand beside a job, print the findings, and return the exit status."""
    hand_image = read_hand_image(image)
    with closing(KubernetesApi(options.context, namespace or options.namespace)) as api:
        findings = examine_hands(api, job, hand_image, container=container)
    if is_json:
        print_json({"hands": msgspec.to_builtins(findings)})
    else:
        console().print(render_hands(findings))
    return 0 if all(finding.works for finding in findings) else EXIT_FAILED


def render_hands(findings: Sequence[HandFinding]) -> DataTable:
    """Return a table with a row for each hand."""
    names = (Column("hand", is_heading=True), Column("trial"))
    table = DataTable(*names, Column("seen", is_text=True), Column("remedy", is_text=True))
    for finding in findings:
        result = "works" if finding.works else "refused"
        table.add_row(finding.hand, result, finding.text, finding.remedy)
    return table


def _mark(finding: ClusterFinding) -> tuple[str, str]:
    """Return the state of a finding, and its colour."""
    return _MISSING if not finding.is_there else _LIMITED if finding.is_limited else _OK


def _run_trial() -> list[ClusterFinding]:
    """Run a job of three steps, and return one finding: its duration, or why it failed."""
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
    """Return the finding that the job failed, which makes the cluster unfit."""
    return ClusterFinding(
        "a run", reason, BadInput("job", _JOB, f"have the cluster run it: {reason}")
    )


@app.command("manifests")
def show_manifests(
    namespace: Annotated[str, typer.Option(help="Namespace for the runs.")] = "chaos",
    security: Annotated[
        Literal["restricted", "baseline", "privileged"],
        typer.Option(
            help="Pod Security level of the namespace. The pods of chaoskit itself are restricted."
        ),
    ] = "restricted",
    machines: Annotated[
        bool,
        typer.Option(
            "--machines", help="Add a ClusterRole for users that inject faults into machines."
        ),
    ] = False,
    attach: Annotated[
        bool,
        typer.Option(
            "--attach",
            help="Print only the roles for faults in jobs that already run in the namespace.",
        ),
    ] = False,
    nightly: Annotated[
        str,
        typer.Option(
            "--nightly",
            metavar="IMAGE",
            help="Add a CronJob that runs chaoskit nightly run in this image.",
        ),
    ] = "",
) -> None:
    """Print the manifests that an administrator applies once for all users.

    They are a namespace that allows runs, the service account of drivers in it, and a role for
    users with few rights. Nothing is started. The same manifests are in deploy/, for kustomize and
    for Helm. With --attach they are roles for the namespace of other jobs, which stays as it is.

    Example: [cyan]chaoskit cluster manifests --namespace chaos | kubectl apply -f -[/]
    """
    if attach and nightly:
        raise BadInput(
            "nightly", nightly, "leave it out: print the roles of --attach by themselves"
        )
    objects = attach_roles(namespace) if attach else installation(namespace, security)
    objects += [machine_rights()] if machines else []
    objects += nightly_job(namespace, NightlyJob(nightly)) if nightly else []
    documents = [msgspec.yaml.encode(kubernetes_object).decode() for kubernetes_object in objects]
    sys.stdout.write("---\n".join(documents))


@app.command("list")
def list_sessions(is_json: Json = False) -> None:
    """List the sessions in the namespace, each with its origin and the number of its pods.

    Example: [cyan]chaoskit cluster list[/]
    """
    with closing(_api()) as api:
        sessions = _sessions(api)
        if not sessions:
            with suppress(ApiError):  # not every user may read namespaces
                find_namespace(api)
        pods = [
            pod["metadata"]["labels"].get(manifests.SESSION)
            for pod in api.find("Pod", manifests.SESSION)
        ]
    rows = [
        {
            "session": name,
            "started_by": job["metadata"].get("annotations", {}).get(manifests.STARTED_BY, ""),
            "since": job["metadata"]["creationTimestamp"],
            "pods": pods.count(name),
        }
        for name, job in sessions.items()
    ]
    if is_json:
        print_json({"sessions": rows})
    elif rows:
        console().print(render_sessions(rows))
    else:
        echo("no sessions")


def render_sessions(sessions: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return a table with a row for each session.

    Args:
        sessions: the values ``session``, ``pods``, ``since`` and ``started_by`` of each.
    """
    names = (Column("session", is_heading=True), Column("pods", is_number=True), Column("since"))
    table = DataTable(*names, Column("started by", is_text=True))
    for session in sessions:
        table.add_row(
            *(str(session[field]) for field in ("session", "pods", "since", "started_by"))
        )
    return table


@app.command("job")
def show_job(
    job: Annotated[
        str,
        typer.Argument(
            metavar="KIND/NAME",
            help="A job that runs: statefulset/NAME, job/NAME, jobset/NAME, trainjob/NAME, pytorchjob/NAME, "
            "or pods/LABEL=VALUE.",
        ),
    ],
    hand_image: HandImageName = "",
    container: Annotated[
        str, typer.Option(help="Container that trains, if a pod has several.")
    ] = "",
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="Start a hand in each pod, which reads the ranks of its processes. Its container stays in the list "
            "of the pod.",
        ),
    ] = False,
    is_json: Json = False,
) -> None:
    """Show the pods of a training job that runs, and which hands each of them admits.

    A hand is a small program in an ephemeral container, by which faults act on a job that chaoskit
    did not start. The API server is asked by dry runs, so that Pod Security answers. Nothing is
    changed without --ranks. An index of a pod is not a rank.

    Example: [cyan]chaoskit cluster job trainjob/llama --hand-image registry/chaoskit-hand[/]
    """
    if ranks and not hand_image:
        raise BadInput("ranks", "true", "name an image: --hand-image IMAGE")
    with closing(_api()) as api:
        image = read_hand_image(hand_image) if hand_image else None
        preview = preview_job(api, job, image, container=container, reads_ranks=ranks)
    if is_json:
        print_json(msgspec.to_builtins(preview))
        return
    echo(f"{preview.job} in the namespace {preview.namespace}: {len(preview.places)} pods")
    if preview.note:
        echo(preview.note)
    console().print(render_job(preview))


def render_job(preview: JobPreview) -> DataTable:
    """Return a table with a row for each place of a job."""
    names = (Column("place", is_heading=True), Column("pod"), Column("uid"), Column("node"))
    table = DataTable(
        *names,
        Column("container"),
        Column("ranks", is_text=True),
        *(Column(f"hand on {role}", is_text=True) for role in HAND_ROLES),
    )
    for place in preview.places:
        table.add_row(
            place.place,
            place.pod,
            place.uid,
            place.node,
            place.container,
            ", ".join(map(str, place.ranks)) or place.why_no_ranks or "not read",
            *(
                place.refusals[role] or "admitted" if role in place.refusals else "not asked"
                for role in HAND_ROLES
            ),
        )
    return table


@app.command("end")
def end_sessions(
    names: Annotated[
        list[str],
        typer.Argument(metavar="SESSION...", help="Sessions that chaoskit cluster list shows."),
    ],
) -> None:
    """End leftover sessions, such as those of a machine that lost power.

    All objects of the sessions are deleted. A session ends by itself when its pytest ends. Runs of
    a session that is ended here get the verdict error.

    Example: [cyan]chaoskit cluster end chaoskit-1f2e3d4c[/]
    """
    with closing(_api()) as api:
        sessions = _sessions(api)
        for name in names:
            if name not in sessions:
                raise BadInput("session", name, "name a session that chaoskit cluster list shows")
        for name in names:
            end_from_outside(api, name, started_by())


def _api() -> KubernetesApi:
    """Return the API of the cluster that the environment names."""
    options = KubernetesOptions.from_environment(os.environ)
    return KubernetesApi(options.context, options.namespace)


def _sessions(api: KubernetesApi) -> dict[str, Any]:
    """Return the Jobs of the sessions in the namespace, by name."""
    return {job["metadata"]["name"]: job for job in api.find("Job", manifests.SESSION)}
