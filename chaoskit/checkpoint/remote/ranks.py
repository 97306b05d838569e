"""What ranks tell each other while they read together: bytes, what they need, and that one of them cannot go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from chaoskit.checkpoint.manifest import Damaged
from chaoskit.checkpoint.remote.backoff import RemoteRefused, RemoteUnavailable
from chaoskit.checkpoint.remote.dealing import Dealt
from chaoskit.errors import ChaoskitError

_TEXT_BYTES = 500
# States of a rank, in one byte. From the third on they are errors; of several the largest one counts.
GOING_ON, DONE = 0, 1
_ERRORS: tuple[type[ChaoskitError], ...] = (RemoteRefused, RemoteUnavailable, Damaged, ChaoskitError)
_FIRST_ERROR = DONE + 1


class Agreed(Exception):
    """All ranks raise this at the same point. ``error``: what one of them met."""

    def __init__(self, error: ChaoskitError) -> None:
        super().__init__(str(error))
        self.error = error


class State(NamedTuple):
    """Of one rank: a number, and the text of its error."""

    number: int = GOING_ON
    text: str = ""

    @classmethod
    def of(cls, error: Exception) -> State:
        """The state of a rank that met an error."""
        kinds = (number for number, kind in enumerate(_ERRORS) if isinstance(error, kind))
        return cls(_FIRST_ERROR + next(kinds, len(_ERRORS) - 1), str(error) or type(error).__name__)


class Ranks:
    """A process group that sends memory of the host; None: the default one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def from_first(self, produce: Callable[[], bytes]) -> bytes:
        """What ``produce`` gives on rank 0, on all ranks. Raises Agreed if it raises."""
        data, state = b"", State()
        if self.rank == 0:
            try:
                data = produce()
            except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
                state = State.of(error)
        self.agree(state)
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self._group, group_src=0)
        content = torch.empty(int(size), dtype=torch.uint8)
        content.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        if len(content):
            dist.broadcast(content, group=self._group, group_src=0)
        return content.numpy().tobytes()

    def agree(self, state: State, needs: NDArray[np.bool_] | None = None) -> tuple[bool, NDArray[np.bool_]]:
        """Tell all what state this rank is in, and which chunks it needs.

        Returns:
            Whether all ranks are done; ranks × chunks: what they need.

        Raises:
            Agreed: on all ranks, if one of them met an error.
        """
        needs = np.zeros(0, np.bool_) if needs is None else needs
        text = state.text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        own = np.concatenate([np.array([state.number], np.uint8), np.frombuffer(text, np.uint8), np.packbits(needs)])
        told = torch.empty((self.count, len(own)), dtype=torch.uint8)
        dist.all_gather(list(told), torch.from_numpy(own), group=self._group)
        every = told.numpy()
        worst = every[every[:, 0].argmax()]
        if worst[0] >= _FIRST_ERROR:
            reason = worst[1 : 1 + _TEXT_BYTES].tobytes().rstrip(b"\0").decode(errors="replace")
            raise Agreed(_ERRORS[worst[0] - _FIRST_ERROR](reason))
        bits = np.unpackbits(every[:, 1 + _TEXT_BYTES :], axis=1, count=len(needs)).astype(np.bool_)
        return bool((every[:, 0] == DONE).all()), bits

    def spread(self, dealt: Dealt, content: Tensor) -> None:
        """Send the content of a chunk from its reader to the others that need it; they all call this, in one order."""
        if len(dealt.others) == self.count - 1:
            dist.broadcast(content, group=self._group, group_src=dealt.reader)
        elif self.rank == dealt.reader:
            sends = [dist.isend(content, group=self._group, group_dst=other) for other in dealt.others]
            for send in sends:
                if send is not None:
                    send.wait()
        else:
            dist.recv(content, group=self._group, group_src=dealt.reader)
