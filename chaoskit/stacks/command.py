"""A command on several nodes: what stands in its arguments and its environment on each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaoskit.errors import BadInput
from chaoskit.substrate.core.launched_ranks import VARIABLES

#: What a process tells its children about its place in a world of its own: not that of the command.
_OF_ANOTHER_WORLD = (
    *VARIABLES,
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "SLURM_LOCALID",
)


#: What the harness itself tells each command of a run.
_GIVEN = ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT", "CHAOSKIT_RUN_DIR", "CHAOSKIT_DISK")


@dataclass(frozen=True, slots=True)
class Place:
    """A node, as its command is told of it; the names of the fields are those of the placeholders.

    Attributes:
        address: of this node; master_addr: of the first one, where master_port is free.
        run_dir: a directory of this run alone, the same on all nodes, for checkpoints.
        disk: a directory of this run and node alone: the one that faults of disks trouble.
        interface: the network link that leads to the others.
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


#: A name in braces that no shell would replace.
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


def arguments(command: Sequence[str], place: Place) -> tuple[str, ...]:
    """``command`` with the placeholders of one node filled in. Other braces stay as they are."""
    return tuple(_filled(argument, place) for argument in command)


def _filled(argument: str, place: Place) -> str:
    for name in PLACEHOLDERS:
        argument = argument.replace(f"{{{name}}}", str(getattr(place, name)))
    return argument


def inherited_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of the harness that its commands have, too."""
    return {
        name: value
        for name, value in inherited.items()
        if name not in {*_OF_ANOTHER_WORLD, *_GIVEN}
    }


def environment(inherited: Mapping[str, str], place: Place) -> dict[str, str]:
    """The environment of the command on one node: what the harness has, the place, and one thread for arithmetic."""
    usual = {  # unless the user has chosen otherwise
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": place.interface,
        "PYTHONUNBUFFERED": "1",  # else a step would show in the log when a buffer is full
    }
    values = (
        place.node_rank,
        place.nodes,
        place.master_addr,
        place.master_port,
        place.run_dir,
        place.disk,
    )
    given = {name: str(value) for name, value in zip(_GIVEN, values, strict=True)}
    return {**usual, **inherited_variables(inherited), **given}


def require_command(command: object) -> tuple[str, ...]:
    """``command`` as a tuple of texts.

    Raises:
        BadInput: if it is something else, or empty.
    """
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        raise BadInput("command", command, 'use a list of texts, such as ["torchrun", "train.py"]')
    for before, argument in zip(("", *command), command, strict=False):
        if not isinstance(argument, str) or "\0" in argument:
            raise BadInput("command", argument, "use texts only")
        if before != "-c":  # that is code, whose braces may be its own
            _require_placeholders(argument)
    return tuple(command)


def _require_placeholders(argument: str) -> None:
    """Refuse a placeholder that differs from a known one in case, ``-`` or ``_`` only. Raises BadInput."""
    names = {name.replace("_", ""): name for name in PLACEHOLDERS}
    for written in _BRACES.findall(argument):
        name = names.get(written.lower().replace("-", "").replace("_", ""), written)
        if name != written:
            raise BadInput("command", argument, f"write {{{name}}}")
