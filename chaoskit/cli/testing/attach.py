"""``chaoskit attach``: inject faults into a training that runs already, and judge it.

-> attach/run/attach.py: the run. cli/machine/cluster.py: the pods and ranks of such a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from chaoskit.attach.fault_preview import FaultPreview
from chaoskit.attach.guards.guard_rails import GuardRails
from chaoskit.attach.run.attach import AttachLimits, attach
from chaoskit.cli.confirm import confirm, require_terminal
from chaoskit.cli.machine.fault_table import render_faults
from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.faults.notation import parse_fault
from chaoskit.launcher.launch import fresh_directory
from chaoskit.process.host_checks import require_writable
from chaoskit.report.store import encode_outcome, write_outcome
from chaoskit.report.summary import render_summary

app = command_app()


@app.command("attach")
def attach_to(
    job: Annotated[
        str,
        typer.Argument(
            metavar="KIND/NAME",
            help="A job that runs: statefulset/NAME, job/NAME, jobset/NAME, trainjob/NAME, pytorchjob/NAME, "
            "or pods/LABEL=VALUE.",
        ),
    ],
    fault: Annotated[
        list[str],
        typer.Option(
            metavar="FAULT", help="A fault, such as 'Kill(rank=1, after_s=5)'; repeatable."
        ),
    ],
    watch: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help=r"YAML or TOML with the patterns of its log: step: 'step (\d+)', and loss if losses matter.",
        ),
    ],
    twin: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML with the manifests of a second job of the same training. It runs afterwards without a fault, "
            "and the losses are compared.",
        ),
    ] = None,
    twin_deadline_s: Annotated[
        float | None,
        typer.Option("--twin-deadline-s", help="Time for the second job. Default: 3600 s."),
    ] = None,
    hand_image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            envvar="CHAOSKIT_HAND_IMAGE",
            help="Image of hands: docker build --target hand; or a YAML file with its name, command and mounts.",
        ),
    ] = "",
    exec_hands: Annotated[
        bool,
        typer.Option(
            "--exec-hands",
            help="Start hands on processes by exec in the container that trains, where no image can be pulled.",
        ),
    ] = False,
    namespace: Annotated[
        str,
        typer.Option(envvar="CHAOSKIT_KUBERNETES_NAMESPACE", help="Namespace of the job."),
    ] = "",
    context: Annotated[
        str,
        typer.Option(envvar="CHAOSKIT_KUBERNETES_CONTEXT", help="Context of the kubeconfig."),
    ] = "",
    container: Annotated[
        str, typer.Option(help="Container that trains, if a pod has several.")
    ] = "",
    deadline_s: Annotated[
        float | None, typer.Option("--deadline-s", help="Time for the whole run. Default: 900 s.")
    ] = None,
    stalled_s: Annotated[
        float | None,
        typer.Option(
            "--stalled-s",
            help="The run has failed if no step is shown for so long. Default: 180 s.",
        ),
    ] = None,
    observe_s: Annotated[
        float | None,
        typer.Option(
            "--observe-s", help="Time to observe the job after the last fault. Default: 10 s."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Number of pods that the job must have. Default: any.")
    ] = None,
    max_nodes: Annotated[
        int | None,
        typer.Option(help="Number of pods that the faults may strike. Default: all but one."),
    ] = None,
    max_share: Annotated[
        float | None, typer.Option(help="Share of the pods that the faults may strike.")
    ] = None,
    abort: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="End all faults and the run once this is true: file:/PATH, url:https://ADDRESS, or "
            "'metric:https://ADDRESS NAME > 5'; repeatable.",
        ),
    ] = None,
    assume_yes: Annotated[
        bool, typer.Option("--yes", help="Begin without a question, as in CI.")
    ] = False,
    max_lost_steps: Annotated[
        int, typer.Option(help="Steps that may be shown again after a fault.")
    ] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Directory for the outcome, journals and logs.")
    ] = None,
    is_json: Json = False,
) -> int:
    """Inject faults into a training that runs already on Kubernetes, and judge how it comes back.

    Its image needs nothing of chaoskit: hands act in its pods, small programs in ephemeral
    containers. The job goes on afterwards. Before the first fault, the pods that would be struck are
    shown, and you are asked once.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown, 11: error.

    Example: [cyan]chaoskit attach jobset/llama --fault 'Kill(rank=1, after_s=5)' --watch watch.yaml[/]
    """
    faults = [parse_fault(text) for text in fault]
    require_terminal(assume_yes, f"inject into {job}")  # before hands are started
    directory = report or fresh_directory(None, "attach")
    require_writable("report", directory)
    seconds_by_name: dict[str, Any] = {
        "deadline_s": deadline_s,
        "stalled_s": stalled_s,
        "observe_s": observe_s,
        "twin_deadline_s": twin_deadline_s,
    }
    plan = {name: seconds for name, seconds in seconds_by_name.items() if seconds is not None}

    def ask(rows: Sequence[FaultPreview]) -> bool:
        """Show the faults as they would strike, and ask once."""
        output = console(is_json)
        output.print(render_faults(rows))
        if twin is not None:
            output.print(f"Afterwards a second job runs, and is deleted: {twin}", markup=False)
        return confirm(f"Inject into {job}", assume_yes)

    outcome = attach(
        job,
        watch=watch,
        faults=faults,
        image=hand_image,
        exec_hands=exec_hands,
        namespace=namespace,
        context=context,
        container=container,
        twin=twin or "",
        directory=directory,
        max_lost_steps=max_lost_steps,
        limits=AttachLimits(GuardRails(max_nodes, max_share), nodes, tuple(abort or ()), ask),
        **plan,
    )
    write_outcome(outcome, Path(outcome.directory))
    if is_json:
        print_json(msgspec.json.decode(encode_outcome(outcome)))
    else:
        console().print(render_summary([outcome]))
    return outcome.verdict.exit_code
