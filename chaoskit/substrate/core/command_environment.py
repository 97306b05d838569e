"""The environment variables of a command on a node.

-> ``cluster/command_runner.py`` starts the command with them. ``stacks/command.py``: the variables
that differ between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from chaoskit.substrate.core.launched_ranks import VARIABLES

#: Variables of a process's place in another world, which the command must not inherit.
_RANK_VARIABLES = (
    *VARIABLES,
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "SLURM_LOCALID",
)
#: Variables that the harness sets for each command of a run.
HARNESS_VARIABLES = (
    "NODE_RANK",
    "NNODES",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CHAOSKIT_RUN_DIR",
    "CHAOSKIT_DISK",
)


class CommandEnvironment(msgspec.Struct, frozen=True):
    """The variables of a command that are added to those of its node.

    Attributes:
        defaults: variables that are set unless the node has them.
        settings: variables that are set in any case.
    """

    defaults: dict[str, str]
    settings: dict[str, str]

    def on(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of the command on a node with these variables."""
        return {**self.defaults, **inherited_variables(variables), **self.settings}


def inherited_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a command inherits.

    These are all but ranks of another world, and those that the harness sets itself.
    """
    return {
        name: text
        for name, text in variables.items()
        if name not in {*_RANK_VARIABLES, *HARNESS_VARIABLES}
    }
