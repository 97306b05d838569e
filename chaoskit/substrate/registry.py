"""Substrates by name: built-in ones, those of other distributions, and any ``module:factory``.

The module of a substrate is loaded only when that substrate is requested.

-> ``core/base.py``: the interface of a substrate. ``limits/capabilities.py``: what this machine
supports. ``core/extensions.py``: further faults of other distributions.
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
#: Built-in substrates, the cheapest first.
NAMES = (LOCAL, NETNS, DOCKER, KUBERNETES)
#: Entry points of this group are factories of substrates. A factory may have an attribute
#: ``unavailable``: a function that returns the reason why this machine does not support it, or "".
GROUP = "chaoskit.substrates"


def names() -> tuple[str, ...]:
    """Return the names of all substrates. Built-in ones come first, the cheapest at the front."""
    return (*NAMES, *sorted(point.name for point in entry_points(group=GROUP)))


def _factory(name: str) -> Callable[[], Substrate]:
    """Return the factory of a substrate that is not built in.

    Raises BadInput if there is none of that name, or it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        if attribute:
            return cast("Callable[[], Substrate]", getattr(import_module(module), attribute))
        for point in entry_points(group=GROUP, name=name):
            return cast("Callable[[], Substrate]", point.load())
    except (ImportError, AttributeError) as error:
        raise BadInput(
            "substrate",
            name,
            f"install the package that provides it, or put it on PYTHONPATH: {error}",
        ) from error
    raise BadInput(
        "substrate",
        name,
        name_remedy(name, names(), f"use one of {', '.join(names())}, or module:factory"),
    )


def unavailable(name: str) -> str:
    """Return the reason why this machine does not support a substrate, or "" if it does.

    Raises:
        BadInput: if there is no substrate of that name.
    """
    if name not in NAMES:
        reason: Callable[[], str] = getattr(_factory(name), "unavailable", str)
        return reason()
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
    """Raise BadInput if :func:`make` cannot make the substrate."""
    if reason := unavailable(name):
        raise BadInput("substrate", name, f"use {LOCAL!r}: {reason}")


def make(name: str, *, docker_image: str = "") -> Substrate:
    """Return a new substrate. It starts its processes when they are first needed.

    Args:
        name: name of the substrate, or ``module:factory``.
        docker_image: for ``docker``: an image with chaoskit in it. Default: the image that
            ``CHAOSKIT_DOCKER_IMAGE`` names, or else this host's own Python.

    Raises:
        BadInput: if there is no such substrate, or this machine does not support it.
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
    """Return the name of the cheapest built-in substrate that meets every need.

    Args:
        needs: the names of the substrates that meet each need; with no needs, ``local`` is
            returned.

    Raises:
        BadInput: if no substrate meets all of them.
    """
    common = set(NAMES).intersection(*map(set, needs))
    if not common:
        raise BadInput("faults", "", "remove some of them: no substrate supports all of them")
    return next(name for name in NAMES if name in common)
