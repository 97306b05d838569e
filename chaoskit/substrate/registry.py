"""Substrates by name: those of this package, those that other distributions bring, and any by ``module:factory``.

Modules of those that are not asked for are not loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from chaoskit.errors import BadInput, name_remedy

if TYPE_CHECKING:
    from chaoskit.substrate.core.base import Substrate

LOCAL, NETNS, DOCKER, KUBERNETES = "local", "netns", "docker", "kubernetes"
#: Cheapest first.
NAMES = (LOCAL, NETNS, DOCKER, KUBERNETES)
#: Entry points of this group name what makes a substrate. It may have an attribute ``unavailable``, which gives the
#: reason why this machine has none.
GROUP = "chaoskit.substrates"


def names() -> tuple[str, ...]:
    """All that can be asked for by a name, cheapest first; after ours those of other distributions."""
    return (*NAMES, *sorted(entry.name for entry in entry_points(group=GROUP)))


def _factory(name: str) -> Callable[[], Substrate]:
    """What makes a substrate that is not ours. Raises BadInput."""
    module, _, attribute = name.partition(":")
    try:
        if attribute:
            return cast("Callable[[], Substrate]", getattr(import_module(module), attribute))
        for entry in entry_points(group=GROUP, name=name):
            return cast("Callable[[], Substrate]", entry.load())
    except (ImportError, AttributeError) as error:
        raise BadInput(
            "substrate", name, f"install what has it, or put it on PYTHONPATH: {error}"
        ) from error
    raise BadInput(
        "substrate",
        name,
        name_remedy(name, names(), f"use one of {', '.join(names())}, or module:factory"),
    )


def unavailable(name: str) -> str:
    """Why this machine has no such substrate; "" if it has.

    Raises:
        BadInput: if there is none of that name.
    """
    if name not in NAMES:
        why: Callable[[], str] = getattr(_factory(name), "unavailable", str)
        return why()
    if name == LOCAL:
        return ""
    if name == DOCKER:
        from chaoskit.substrate.docker import daemon

        return daemon.unavailable()
    if name == KUBERNETES:
        from chaoskit.substrate.kubernetes.options import KubernetesOptions

        return KubernetesOptions.from_environment(os.environ).unavailable()
    from chaoskit.substrate.limits import capabilities

    return capabilities.namespaces()


def require(name: str) -> None:
    """Refuse what :func:`make` cannot make. Raises BadInput."""
    if reason := unavailable(name):
        raise BadInput("substrate", name, f"use {LOCAL!r}: {reason}")


def make(name: str, *, docker_image: str = "") -> Substrate:
    """The substrate of that name. It starts its processes when they are first needed.

    Args:
        docker_image: for ``docker``: an image with chaoskit in it. Else it is the one that ``CHAOSKIT_DOCKER_IMAGE``
            names, or this host's own Python.

    Raises:
        BadInput: if there is none, or this machine cannot have it.
    """
    require(name)
    if name == NETNS:
        from chaoskit.substrate.netns.substrate import NetnsSubstrate

        return NetnsSubstrate()
    if name == DOCKER:
        from chaoskit.substrate.docker.daemon import IMAGE_VARIABLE
        from chaoskit.substrate.docker.substrate import DockerSubstrate

        return DockerSubstrate(docker_image or os.environ.get(IMAGE_VARIABLE, ""))
    if name == KUBERNETES:
        from chaoskit.substrate.kubernetes.options import KubernetesOptions
        from chaoskit.substrate.kubernetes.substrate import KubernetesSubstrate

        return KubernetesSubstrate(KubernetesOptions.from_environment(os.environ))
    if name != LOCAL:
        return _factory(name)()
    from chaoskit.substrate.local import LocalSubstrate

    return LocalSubstrate()


def for_all(needs: Iterable[Iterable[str]]) -> str:
    """The cheapest substrate that meets every need, each told as the substrates that meet it.

    Raises:
        BadInput: if there is none.
    """
    common = set(NAMES).intersection(*map(set, needs))
    if not common:
        raise BadInput("faults", "", "leave some out: no substrate can do them all")
    return next(name for name in NAMES if name in common)
