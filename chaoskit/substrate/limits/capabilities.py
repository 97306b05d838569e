"""Capabilities of this machine: the actions on networks, disks and processes that are possible.

Namespaces, rules and queues are tried out in an unused namespace; control groups are looked up.
Most functions return the reason why an action is impossible, or "". Answers about namespaces,
packets and disks are kept for the life of this process.

-> The substrates refuse faults for these reasons (``why_not``), and ``registry.py`` refuses whole
substrates.
"""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from chaoskit.substrate.core import commands
from chaoskit.substrate.core.actions import CONTROLLERS, Action, BreakDisk
from chaoskit.substrate.core.extensions import has_external_backend
from chaoskit.substrate.core.traffic import Block, Change, Degrade, Narrow, nft_table
from chaoskit.substrate.limits import cgroup

_TOOLS = ("unshare", "nsenter")
_AS_THIS_USER = ("--net",)
_WITH_MOUNTS = ("--mount",)
_FUSE = "/dev/fuse"
#: Name of the FUSE library for the linker.
FUSE_LIBRARY = "fuse3"
_IN_A_USER_NAMESPACE = ("--user", "--map-root-user", "--net")


@functools.cache
def isolation() -> tuple[str, ...]:
    """Return the options with which ``unshare`` can create a network namespace here.

    They are empty if it cannot.
    """
    ways = (_AS_THIS_USER, _IN_A_USER_NAMESPACE)
    return next((options for options in ways if not _refusal(["unshare", *options, "true"])), ())


def privileged() -> bool:
    """Return whether this user may create network namespaces without a user namespace."""
    return isolation() == _AS_THIS_USER


def namespaces() -> str:
    """Return why this machine cannot give each node a network of its own; "" if it can."""
    missing = [tool for tool in _TOOLS if commands.find(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install util-linux"
    if not isolation():
        return (
            "network namespaces cannot be created as this user or in a user namespace: run as root"
        )
    return ""


@functools.cache
def rules() -> str:
    """Return why packets cannot be dropped or answered; "" if they can."""
    way, ports, addresses = (("a", "b"),), {"a": "lo", "b": "lo"}, {"b": "10.77.0.2"}
    changes = (Block(ways=way, share=0.5), Block(ways=way, loud=True))
    script = "".join(
        nft_table(f"probe{number}", change, ports, addresses)
        for number, change in enumerate(changes)
    )
    return _refusal_in_namespace(["nft", "-f", "-"], "nftables", script)


@functools.cache
def queues() -> str:
    """Return why packets cannot be passed to a process of chaoskit; "" if they can."""
    verdict = ["--jump", "NFQUEUE", "--queue-num", "1", "--queue-bypass"]
    return _refusal_in_namespace(
        ["iptables", "--wait", "--table", "mangle", "--append", "PREROUTING", *verdict], "iptables"
    )


@functools.cache
def disciplines() -> frozenset[str]:
    """Return which of the queueing disciplines ``htb`` and ``netem`` the kernel has.

    The set is empty if no network namespace can be created to try them in, or that takes too long.
    """
    if namespaces():
        return frozenset()
    command = ["unshare", *isolation(), sys.executable, "-m", "chaoskit.substrate.network.shaping"]
    try:
        return frozenset(commands.call(command).stdout.decode().split())
    except subprocess.TimeoutExpired:
        return frozenset()


def rates() -> str:
    """Return why the rate of a link cannot be limited; "" if it can."""
    return namespaces() or ("" if "htb" in disciplines() else "the kernel has no HTB (sch_htb)")


def delays() -> str:
    """Return why packets cannot be delayed; "" if they can."""
    if reason := namespaces():
        return reason
    if "netem" in disciplines() or not (reason := queues()):
        return ""
    return f"the kernel has no netem (sch_netem), and packets cannot be queued: {reason}"


@functools.cache
def disks() -> str:
    """Return why no file system can be mounted over a directory of a node; "" if one can."""
    try:
        os.close(os.open(_FUSE, os.O_RDWR))
    except OSError as error:
        return f"{_FUSE}: {error.strerror}"
    if importlib.util.find_spec("mfusepy") is None or not ctypes.util.find_library(FUSE_LIBRARY):
        return "no FUSE library: install the package libfuse3 (libfuse3-3, fuse3-libs)"
    if commands.find("nsenter") is None:
        return "nsenter not found: install util-linux"
    return _refusal(["unshare", *_WITH_MOUNTS, "true"])


def unavailable(kind: type[Change]) -> str:
    """Return why this machine cannot make a change of this kind; "" if it can."""
    if kind is Block:
        return rules()
    if kind is Degrade:
        return delays()
    return rates() if kind is Narrow else namespaces()


def why_not(action: type[Action]) -> str:
    """Return why this machine cannot apply an action of this kind to its nodes; "" if it can.

    Raises ImportError or AttributeError as :func:`has_external_backend`, for actions of other
    distributions.
    """
    if issubclass(action, Change):
        return unavailable(action)
    if action is BreakDisk:
        return disks()
    if action in CONTROLLERS:
        return cgroup.unavailable(CONTROLLERS[action])
    return (
        "" if has_external_backend(action) else f"no installed backend supports {action.__name__}"
    )


def _refusal_in_namespace(command: Sequence[str], package: str, script: str = "") -> str:
    """Return why a command of a package fails in a namespace of its own; "" if it succeeds."""
    if reason := namespaces():
        return reason
    path = commands.find(command[0])
    if path is None:
        return f"{command[0]} not found: install the package {package}"
    return _refusal(["unshare", *isolation(), path, *command[1:]], script)


def _refusal(command: Sequence[str], script: str = "") -> str:
    """Run a command, and return the first line of its error; "" if it succeeds."""
    try:
        result = commands.call(command, script)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return ""
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return lines[0] if lines else f"{command[0]} ended with status {result.returncode}"
