"""The check of rights before anything happens to a job that already runs.

-> substrate/kubernetes/api/rights.py: the rights, with reasons.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import Right


def require_rights(api: KubernetesApi, rights: Iterable[Right]) -> None:
    """Refuse to begin without a right that is needed.

    Raises:
        BadInput: if the user lacks one; it names all of them.
        ApiError: if the server does not answer.
    """
    missing = [
        f"{verb} {right.resource}{f'.{right.group}' if right.group else ''} ({right.why})"
        for right in rights
        for verb in right.verbs
        if not api.may(verb, right.group, right.resource)
    ]
    if missing:
        remedy = f"have these rights granted in namespace {api.namespace}: {'; '.join(missing)}"
        raise BadInput("context", api.arguments["context"], remedy)
