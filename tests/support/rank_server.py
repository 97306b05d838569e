"""Imports of the fork server of :mod:`support.ranks` before its first fork. No other process
imports this module.

Every rank begins as a copy of that server, so the imports below cost their two seconds once a
session. The server has a single thread, so no other thread can hold a lock at the moment of a fork.
"""

from __future__ import annotations

import os

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed.fsdp
import torch.distributed.tensor

from chaoskit.process.linux import die_with_parent
from chaoskit.runtime.group import world  # noqa: F401
from chaoskit.runtime.state import replica  # noqa: F401

#: The pid of the server: the parent of every rank.
PID = os.getpid()

# A process that ran a multi-threaded operation of torch cannot be forked: its child waits for
# threads that it lacks.
torch.set_num_threads(1)
# The pipe that ends the server with the test session is held open by every copy of that process,
# this signal is not.
die_with_parent(int(os.environ["CHAOSKIT_RANKS_OF"]))
