"""The check of rights before anything happens to a job that already runs.

-> substrate/kubernetes/api/rights.py: the rights, with reasons.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import Right


def require_rights(
    api: KubernetesApi, rights: Iterable[Right], *, everywhere: bool = False
) -> None:
    """Refuse to begin without a right that is needed.

    Args:
        everywhere: True for rights in the whole cluster, such as those over machines.

    Raises:
        BadInput: if the user lacks one; it names all of them.
        ApiError: if the server does not answer.
    """
    missing = [
        f"{verb} {right.resource}{f'.{right.group}' if right.group else ''} ({right.why})"
        for right in rights
        for verb in right.verbs
        if not api.may(verb, right.group, right.resource, everywhere=everywhere)
    ]
    if missing:
        where = "the whole cluster" if everywhere else f"namespace {api.namespace}"
        remedy = f"have these rights granted in {where}: {'; '.join(missing)}"
        raise BadInput("context", api.arguments["context"], remedy)
