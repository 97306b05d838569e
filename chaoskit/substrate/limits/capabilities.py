"""What this machine can do to the network of a run. Each answer was tried, in an unused namespace."""

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
from chaoskit.substrate.core.extensions import is_brought
from chaoskit.substrate.core.traffic import Block, Change, Degrade, Narrow, nft_table
from chaoskit.substrate.limits import cgroup

_TOOLS = ("unshare", "nsenter")
_AS_THIS_USER = ("--net",)
_WITH_MOUNTS = ("--mount",)
_FUSE = "/dev/fuse"
#: As the linker knows it.
FUSE_LIBRARY = "fuse3"
_IN_A_USER_NAMESPACE = ("--user", "--map-root-user", "--net")


@functools.cache
def isolation() -> tuple[str, ...]:
    """Options with which ``unshare`` makes a network namespace here; none where it cannot."""
    ways = (_AS_THIS_USER, _IN_A_USER_NAMESPACE)
    return next((options for options in ways if not _refusal(["unshare", *options, "true"])), ())


def privileged() -> bool:
    """Whether this user may make network namespaces without a user namespace around them."""
    return isolation() == _AS_THIS_USER


def namespaces() -> str:
    """Why this machine cannot give each node a network of its own; "" if it can."""
    missing = [tool for tool in _TOOLS if commands.find(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install util-linux"
    if not isolation():
        return "neither as this user nor in a user namespace may network namespaces be made: run as root"
    return ""


@functools.cache
def rules() -> str:
    """Why packets cannot be dropped or answered; "" if they can."""
    way, port, address = (("a", "b"),), {"a": "lo", "b": "lo"}, {"b": "10.77.0.2"}
    changes = (Block(ways=way, share=0.5), Block(ways=way, loud=True))
    script = "".join(
        nft_table(f"probe{number}", change, port, address) for number, change in enumerate(changes)
    )
    return _inside(["nft", "-f", "-"], "nftables", script)


@functools.cache
def queues() -> str:
    """Why packets cannot be handed to a process of ours; "" if they can."""
    verdict = ["--jump", "NFQUEUE", "--queue-num", "1", "--queue-bypass"]
    return _inside(
        ["iptables", "--wait", "--table", "mangle", "--append", "PREROUTING", *verdict], "iptables"
    )


@functools.cache
def disciplines() -> frozenset[str]:
    """Which queueing disciplines that we use the kernel has: ``htb`` and ``netem``."""
    if namespaces():
        return frozenset()
    command = ["unshare", *isolation(), sys.executable, "-m", "chaoskit.substrate.network.shaping"]
    try:
        return frozenset(commands.call(command).stdout.decode().split())
    except subprocess.TimeoutExpired:
        return frozenset()


def rates() -> str:
    """Why the rate of a link cannot be limited; "" if it can."""
    return namespaces() or ("" if "htb" in disciplines() else "the kernel has no HTB (sch_htb)")


def delays() -> str:
    """Why packets cannot be held up; "" if they can."""
    if reason := namespaces():
        return reason
    if "netem" in disciplines() or not (reason := queues()):
        return ""
    return f"the kernel has no netem (sch_netem), and no other way: {reason}"


@functools.cache
def disks() -> str:
    """Why no file system can be put before a directory of a node; "" if one can."""
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
    """Why this machine cannot make a change of this kind; "" if it can."""
    if kind is Block:
        return rules()
    if kind is Degrade:
        return delays()
    return rates() if kind is Narrow else namespaces()


def why_not(action: type[Action]) -> str:
    """Why this machine cannot do an action of this kind to nodes that it has itself; "" if it can."""
    if issubclass(action, Change):
        return unavailable(action)
    if action is BreakDisk:
        return disks()
    if action in CONTROLLERS:
        return cgroup.unavailable(CONTROLLERS[action])
    return "" if is_brought(action) else f"no backend that is installed here does {action.__name__}"


def _inside(command: Sequence[str], package: str, script: str = "") -> str:
    """Why the command fails in a namespace of its own; "" if it does not."""
    if reason := namespaces():
        return reason
    path = commands.find(command[0])
    if path is None:
        return f"{command[0]} not found: install the package {package}"
    return _refusal(["unshare", *isolation(), path, *command[1:]], script)


def _refusal(command: Sequence[str], script: str = "") -> str:
    try:
        done = commands.call(command, script)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[0] if said else f"{command[0]} ended with status {done.returncode}"
