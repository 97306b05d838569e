"""The arguments and environment of a command on each of its nodes.

-> ``substrate/cluster/bare.py`` and ``substrate/cluster/command_runner.py`` start it there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.substrate.core.command_environment import HARNESS_VARIABLES, CommandEnvironment
from chaoskit.substrate.supervisor.sources import NEVER_COPIED


@dataclass(frozen=True, slots=True)
class CommandNode:
    """The values for a command on one node.

    The fields, except ``interface``, are named after the placeholders.

    Attributes:
        node_rank: the number of the node, from 0.
        nodes: the number of nodes.
        address: the address of this node.
        master_addr, master_port: the address of the first node, and a free port there.
        run_dir: a directory for checkpoints, used by this run only and the same on all nodes; "" if
            the nodes share none.
        disk: a directory used by this run and node only, which disk faults affect.
        seed: the seed of the run.
        interface: the network interface towards the other nodes; "" for any.
    """

    node_rank: int
    nodes: int
    address: str
    master_addr: str
    master_port: int
    run_dir: str
    disk: str
    seed: int
    interface: str


#: A name in braces, without the dollar sign of a shell variable.
_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_-]+)\}")

PLACEHOLDERS = (
    "node_rank",
    "nodes",
    "address",
    "master_addr",
    "master_port",
    "run_dir",
    "disk",
    "seed",
)


def arguments(command: Sequence[str], node_values: CommandNode) -> tuple[str, ...]:
    """Return ``command`` with the placeholders of one node filled in.

    Other braces stay as they are.
    """
    return tuple(_fill_placeholders(argument, node_values) for argument in command)


def _fill_placeholders(argument: str, node_values: CommandNode) -> str:
    """Return an argument with its placeholders filled in."""
    for name in PLACEHOLDERS:
        argument = argument.replace(f"{{{name}}}", str(getattr(node_values, name)))
    return argument


def path_on_node(argument: str, paths: Mapping[str, str]) -> str:
    """Return an argument as the node sees it: a path below a copied directory names the copy.

    Any other argument is returned as it is, such as one in a folder that is never copied. Of nested
    directories the innermost counts.

    Args:
        argument: an argument of the command, or its working directory.
        paths: directory of this host -> its copy on the node.
    """
    if not Path(argument).is_absolute():
        return argument
    path = Path(os.path.normpath(argument))  # a copy has no path that leads out of it
    for directory in (path, *path.parents):
        if (copy := paths.get(str(directory))) is not None:
            inner_path = path.relative_to(directory)
            is_copied = not any(part in NEVER_COPIED for part in inner_path.parts)
            return str(Path(copy) / inner_path) if is_copied else argument
    return argument


def environment(node_values: CommandNode) -> CommandEnvironment:
    """Return the variables that the command on one node gets besides those of its node.

    One thread for arithmetic, the network interface of gloo and NCCL, and unbuffered output are set
    unless the user sets them. A variable without a value is left out.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": node_values.interface,
        "NCCL_SOCKET_IFNAME": node_values.interface,
        "PYTHONUNBUFFERED": "1",  # else a step appears in the log only when a buffer is full
    }
    values = (
        node_values.node_rank,
        node_values.nodes,
        node_values.master_addr,
        node_values.master_port,
        node_values.run_dir,
        node_values.disk,
    )
    settings = {
        name: str(setting)
        for name, setting in zip(HARNESS_VARIABLES, values, strict=True)
        if setting != ""
    }
    return CommandEnvironment(defaults, settings)


def require_command(command: object) -> tuple[str, ...]:
    """Return ``command`` as a tuple of texts.

    Raises:
        BadInput: if it is empty or not a list of texts, or a placeholder is misspelled.
    """
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        raise BadInput("command", command, 'use a list of texts, such as ["torchrun", "train.py"]')
    for before, argument in zip(("", *command), command, strict=False):
        if not isinstance(argument, str) or "\0" in argument:
            raise BadInput("command", argument, "use texts only")
        if before != "-c":  # an argument after -c is code with braces of its own
            _require_placeholders(argument)
    return tuple(command)


def _require_placeholders(argument: str) -> None:
    """Raise BadInput for a placeholder that differs from a valid one in case or dashes only."""
    names = {name.replace("_", ""): name for name in PLACEHOLDERS}
    for written in _BRACES.findall(argument):
        name = names.get(written.lower().replace("-", "").replace("_", ""), written)
        if name != written:
            raise BadInput("command", argument, f"write {{{name}}}")
