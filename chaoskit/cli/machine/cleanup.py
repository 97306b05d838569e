"""``chaoskit cleanup``: remove leftovers of killed runs.

-> substrate/undo/janitor.py: the leftovers, and what undoes them. attach/leftovers.py: those in pods.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import closing
from typing import Annotated

import typer

from chaoskit.attach.leftovers import (
    NamespaceLeftovers,
    clean_namespace,
    describe_hands,
    describe_twin_object,
)
from chaoskit.cli.output import Json, command_app, print_json
from chaoskit.errors import BadInput
from chaoskit.plaintext import echo
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.undo import any_left, describe, sweep

app = command_app()


@app.command()
def cleanup(
    namespace: Annotated[
        str,
        typer.Option(
            envvar="CHAOSKIT_KUBERNETES_NAMESPACE",
            help="Also look at the pods and second jobs of this namespace of a Kubernetes cluster.",
        ),
    ] = "",
    is_json: Json = False,
) -> None:
    """Remove leftovers of killed runs, and change nothing else.

    The command continues processes that were left stopped, ends those that were left running, and
    removes control groups, containers and temporary directories. A guard beside each run does the
    same when the run is killed, and every run does it at its start. With a namespace it also deletes
    pods of chaoskit cluster doctor that are over, and lists the containers of hands in other pods and
    the objects of second jobs, with the command that deletes them.
    Use [cyan]python -m
    chaoskit.substrate.undo[/] if only Python's standard library works.

    Exit code 0: nothing is left, 1: a leftover could not be removed; the next call tries again.
    Containers of hands do not count: nothing can remove them from their pods. Neither do objects of
    second jobs: the run that made them may go on.

    Example: [cyan]chaoskit cleanup[/]
    """
    repairs = sweep()
    in_pods = _clean_pods(namespace) if namespace else None
    if is_json:
        records = {"repairs": [dataclasses.asdict(repair) for repair in repairs]}
        print_json(records if in_pods is None else records | {"pods": dataclasses.asdict(in_pods)})
    else:
        lines = [describe(repair) for repair in repairs]
        lines += [] if in_pods is None else _lines(in_pods)
        for line in lines or ["no leftovers"]:
            echo(line)
    if any_left(repairs):
        raise typer.Exit(1)


def _clean_pods(namespace: str) -> NamespaceLeftovers:
    """Delete what can be deleted in a namespace, and return what is left.

    A cluster that cannot be asked is a problem of the result, as other leftovers are removed first.
    """
    context = KubernetesOptions.from_environment(os.environ).context
    try:
        api = KubernetesApi(context, namespace)
    except BadInput as error:
        return NamespaceLeftovers(namespace, problem=str(error))
    with closing(api):
        return clean_namespace(api)


def _lines(left: NamespaceLeftovers) -> list[str]:
    """Return lines about the leftovers in a namespace."""
    lines = [f"{name}: the pod was over, and is deleted" for name in left.removed_pods]
    lines += [line for hands in left.hands for line in describe_hands(hands)]
    lines += [
        describe_twin_object(twin_object, left.namespace) for twin_object in left.twin_objects
    ]
    if left.twin_problem:
        lines.append(
            f"the second jobs in namespace {left.namespace} are not all known: {left.twin_problem}"
        )
    if left.problem:
        lines.append(f"the pods of namespace {left.namespace} are not known: {left.problem}")
    return lines
