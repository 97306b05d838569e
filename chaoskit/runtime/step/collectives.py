"""Collectives of the user's own code, between two steps: what each rank contributes to a call, and what comes of it.

Pure but for the user's functions: how contributions travel, and what happens when a rank is lost meanwhile, is a matter
of the trainers, which keep results in a :class:`~chaoskit.runtime.group.collective_log.CollectiveLog`.

A contribution has a key: a shard, or a rank. Each key is owed by one rank of the world in which the call is completed.
A rank that is lost takes its contribution along, so after a fault other ranks compute the shards that it owed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from chaoskit.errors import BadInput, JobFailed
from chaoskit.runtime.group.collective_log import RESULTS_BYTES_MAX
from chaoskit.runtime.reduction.tree import Subtree, merge_order

Value = float | int | Tensor
_Combine = Callable[[Tensor, Tensor], Tensor]

_SUM: _Combine = torch.add
_COMBINE: dict[str, _Combine] = {
    "sum": _SUM,
    "mean": _SUM,
    "max": torch.maximum,
    "min": torch.minimum,
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
}
_NO_GROUP = (
    "Default process group has not been initialized",
    "using env:// rendezvous",
)  # torch's own words
_NUMBERS = {"float": torch.float64, "int": torch.int64}
_INT64 = torch.iinfo(torch.int64)


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A value as it travels. ``kind``: a dtype, or ``float`` or ``int`` for a number of Python's."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def tensor(self) -> Tensor:
        """The value, as a tensor of its own."""
        dtype = _NUMBERS.get(self.kind) or _DTYPES[self.kind]
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)

    @property
    def value(self) -> Value:
        """What user code gets."""
        tensor = self.tensor
        return tensor.item() if self.kind in _NUMBERS else tensor


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """What one rank tells all others in a call."""

    step: int
    number: int
    call: str
    parts: dict[int, Packed]


class _Result(msgspec.Struct, frozen=True, array_like=True):
    """What the log holds. ``packed`` is None for a barrier."""

    call: str
    packed: Packed | None


_rows = msgspec.msgpack.Decoder(_Row)
_results = msgspec.msgpack.Decoder(_Result)


def pack(field: str, value: Any) -> Packed:
    """Return ``value`` as it travels.

    Raises:
        BadInput: if it is no number and no small tensor on the CPU.
    """
    if isinstance(value, float):
        return Packed("float", (), _bytes(torch.tensor(value, dtype=torch.float64)))
    if isinstance(value, int) and _INT64.min <= value <= _INT64.max:
        return Packed("int", (), _bytes(torch.tensor(value, dtype=torch.int64)))
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    plain = (
        type(value) in (Tensor, nn.Parameter) and kind in _DTYPES and value.layout == torch.strided
    )
    if not plain or value.device.type != "cpu":
        remedy = "pass a float, an int of 64 bits or a CPU tensor; for values of shards a function, with shards=N"
        raise BadInput(field, _describe(value), remedy)
    if value.nbytes > RESULTS_BYTES_MAX:
        raise BadInput(
            field,
            f"{value.nbytes} bytes",
            f"use at most {RESULTS_BYTES_MAX} bytes: a metric, not data",
        )
    return Packed(kind, tuple(value.shape), _bytes(value))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__} of {value.dtype} on {value.device}"
    return repr(value)[:80]


def combine(parts: Sequence[Tensor], op: str) -> Tensor:
    """Reduce ``parts`` in the canonical tree: the same bits whatever rank does it."""
    held = {Subtree(index, index + 1): part for index, part in enumerate(parts)}
    for merge in merge_order(held, len(parts)):
        held[merge.parent] = _COMBINE[op](held.pop(merge.left), held.pop(merge.right))
    total = held[Subtree(0, len(parts))]
    if op == "mean":
        return (total if total.is_floating_point() else total.double()) / len(parts)
    return total


class Call:
    """One call on one rank.

    Args:
        name: of the method.
        text: the call with its arguments; the same on all ranks.
        keys: what is contributed in a world of the given size, each key by one rank.
        get: the contribution of a key; called on the rank that owes it.
        op: how contributions are reduced.
    """

    def __init__(
        self,
        name: str,
        text: str,
        keys: Callable[[int], range],
        get: Callable[[int], Any] = lambda key: None,
        op: str = "sum",
    ) -> None:
        self.name, self.text = name, text
        self._keys, self._get, self._op = keys, get, op
        self._parts: dict[int, Packed] = {}

    def owed(self, rank: int, world: int) -> list[int]:
        """Return the keys that ``rank`` contributes."""
        return [key for key in self._keys(world) if key % world == rank]

    def compute(self, rank: int, world: int, *, evenly: bool = False) -> None:
        """Compute what is owed, and is not there yet.

        Args:
            evenly: call the user's function as often as on the rank with most keys, and drop what is over: a sharded
                model needs all ranks for each forward pass.
        """
        keys, owed = self._keys(world), self.owed(rank, world)
        for key in owed:
            if key not in self._parts:
                self._parts[key] = pack(self.name, self._get(key))
        for _ in range(math.ceil(len(keys) / world) - len(owed) if evenly else 0):
            self._get((owed or keys)[-1])

    def row(self, step: int, number: int, rank: int, world: int) -> bytes:
        """Return what this rank tells all others.

        Args:
            number: of the call since the last commit.
        """
        parts = {key: self._parts[key] for key in self.owed(rank, world)}
        return msgspec.msgpack.encode(_Row(step, number, self.text, parts))

    def conclude(self, rows: Sequence[bytes]) -> bytes:
        """Return the result, for the log.

        Args:
            rows: of all ranks.

        Raises:
            BadInput: on every rank, if the ranks call different things.
        """
        told = [_rows.decode(row) for row in rows]
        calls = [(row.call, row.number, row.step) for row in told]
        if other := next((rank for rank, call in enumerate(calls) if call != calls[0]), None):
            different = " and ".join(
                f"rank {rank} trainer.{call}, its call {number} since step {step}"
                for rank, (call, number, step) in ((0, calls[0]), (other, calls[other]))
            )
            raise self.refusal(f"{different} called at the same time")
        parts = {key: part for row in told for key, part in row.parts.items()}
        if not parts:
            return msgspec.msgpack.encode(_Result(self.text, None))
        return msgspec.msgpack.encode(_Result(self.text, self._reduce(parts)))

    def _reduce(self, parts: Mapping[int, Packed]) -> Packed:
        ordered = [parts[key] for key in sorted(parts)]
        kinds = {f"{part.kind}{list(part.shape)}" for part in ordered}
        if len(kinds) > 1:
            remedy = "contribute values of one type and shape on every rank and for every shard"
            raise BadInput(self.name, " and ".join(sorted(kinds)), remedy)
        total = combine([part.tensor for part in ordered], self._op)
        if ordered[0].kind in _NUMBERS:
            return pack(self.name, total.item())
        return pack(self.name, total)

    def read(self, result: bytes) -> Value | None:
        """Return what user code gets.

        Args:
            result: as the log gives it.

        Raises:
            BadInput: if it is the result of another call.
        """
        found = _results.decode(result)
        if found.call != self.text:
            raise self.refusal(
                f"this rank calls trainer.{self.text} where others have called trainer.{found.call}"
            )
        return found.packed.value if found.packed is not None else None

    def refusal(self, problem: str) -> BadInput:
        """Return the error of ranks that do not call the same."""
        remedy = f"make the same calls in the same order on every rank, also where only one needs the result: {problem}"
        return BadInput(self.name, self.text, remedy)


def all_reduce(value: Any, op: str, shards: int | None) -> Call:
    """The call of :meth:`Trainer.all_reduce <chaoskit.Trainer.all_reduce>`."""
    if op not in _COMBINE:
        raise BadInput("all_reduce.op", op, f"use one of {', '.join(_COMBINE)}")
    if shards is None:
        pack("all_reduce", value)  # refused before anything travels; a function, too
        return Call("all_reduce", f"all_reduce(op={op!r})", range, lambda rank: value, op)
    if shards < 1:
        raise BadInput("all_reduce.shards", shards, "use 1 or more")
    if not callable(value):
        raise BadInput(
            "all_reduce", _describe(value), "with shards=N pass a function of the shard, 0 to N - 1"
        )
    count = shards
    return Call(
        "all_reduce",
        f"all_reduce(op={op!r}, shards={count})",
        lambda world: range(count),
        value,
        op,
    )


def broadcast(value: Any, source: int) -> Call:
    """The call of :meth:`Trainer.broadcast <chaoskit.Trainer.broadcast>`."""
    if source < 0:
        raise BadInput("broadcast.source", source, "use the number of a rank, from 0")
    if not callable(value):
        pack("broadcast", value)

    def keys(world: int) -> range:
        if source >= world:
            raise BadInput(
                "broadcast.source",
                source,
                f"use a rank below {world}, the ranks of the world; 0 always is",
            )
        return range(source, source + 1)

    return Call(
        "broadcast",
        f"broadcast(source={source})",
        keys,
        lambda rank: value() if callable(value) else value,
    )


def barrier() -> Call:
    """The call of :meth:`Trainer.barrier <chaoskit.Trainer.barrier>`."""
    return Call("barrier", "barrier()", lambda world: range(0))


@contextmanager
def explain_missing_group() -> Iterator[None]:
    """Turn torch's complaint that there is no process group into one that says what to call instead."""
    try:
        yield
    except ValueError as error:
        if not any(text in str(error) for text in _NO_GROUP):
            raise
        raise JobFailed(
            "torch.distributed has no process group in this job: leave out init_process_group and "
            "DistributedDataParallel, and use trainer.rank; for values of your own call trainer.all_reduce, "
            "trainer.broadcast or trainer.barrier behind a transaction"
        ) from error
