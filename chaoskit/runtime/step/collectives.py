"""Collectives of the user's code between two steps: contributions of each rank, and results.

This module is pure except for the user's functions. The trainers exchange contributions and handle
lost ranks. They keep results in a :class:`~chaoskit.runtime.group.collective_log.CollectiveLog`.

A contribution has a key: a shard, or a rank. Each key is owed by one rank of the world in which the
call is completed. The contribution of a lost rank is lost with it, so other ranks then compute its
shards.

-> step/base_trainer.py: the methods that user code calls. step/trainer.py (``_make``): the
exchange.
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
)  # from torch
_NUMBERS = {"float": torch.float64, "int": torch.int64}
_INT64 = torch.iinfo(torch.int64)


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A value in its serialized form.

    Attributes:
        kind: a dtype, or ``float`` or ``int`` for a Python number.
    """

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def tensor(self) -> Tensor:
        """The value as a new tensor."""
        dtype = _NUMBERS.get(self.kind) or _DTYPES[self.kind]
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)

    @property
    def value(self) -> Value:
        """The value that user code gets: a Python number or a new tensor."""
        tensor = self.tensor
        return tensor.item() if self.kind in _NUMBERS else tensor


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """The message that one rank sends to all others in a call."""

    step: int
    number: int
    call: str
    parts: dict[int, Packed]


class _Result(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call, as the log holds it.

    Attributes:
        packed: None for a barrier.
    """

    call: str
    packed: Packed | None


_rows = msgspec.msgpack.Decoder(_Row)
_results = msgspec.msgpack.Decoder(_Result)


def pack(field: str, value: Any) -> Packed:
    """Return ``value`` in its serialized form.

    Raises:
        BadInput: if it is neither a number nor a small tensor on the CPU.
    """
    if isinstance(value, float):
        return Packed("float", (), _bytes(torch.tensor(value, dtype=torch.float64)))
    if isinstance(value, int) and _INT64.min <= value <= _INT64.max:
        return Packed("int", (), _bytes(torch.tensor(value, dtype=torch.int64)))
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    is_plain_tensor = (
        type(value) in (Tensor, nn.Parameter) and kind in _DTYPES and value.layout == torch.strided
    )
    if not is_plain_tensor or value.device.type != "cpu":
        remedy = (
            "pass a float, an int of 64 bits or a CPU tensor; or a function of the shard, "
            "with shards=N"
        )
        raise BadInput(field, _describe(value), remedy)
    if value.nbytes > RESULTS_BYTES_MAX:
        raise BadInput(
            field,
            f"{value.nbytes} bytes",
            f"use at most {RESULTS_BYTES_MAX} bytes: a metric, not data",
        )
    return Packed(kind, tuple(value.shape), _bytes(value))


def _bytes(tensor: Tensor) -> bytes:
    """Return the bits of a tensor in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _describe(value: Any) -> str:
    """Return a short text for a refused value, to be shown in an error."""
    if isinstance(value, Tensor):
        return f"{type(value).__name__} of {value.dtype} on {value.device}"
    return repr(value)[:80]


def combine(parts: Sequence[Tensor], op: str) -> Tensor:
    """Return ``parts`` reduced in the canonical tree: the same bits on every rank.

    Args:
        op: ``sum``, ``mean``, ``max`` or ``min``. The mean of integers is a float64.
    """
    held = {Subtree(index, index + 1): part for index, part in enumerate(parts)}
    for merge in merge_order(held, len(parts)):
        held[merge.parent] = _COMBINE[op](held.pop(merge.left), held.pop(merge.right))
    total = held[Subtree(0, len(parts))]
    if op == "mean":
        return (total if total.is_floating_point() else total.double()) / len(parts)
    return total


class Call:
    """A call of a collective on one rank.

    It computes this rank's contributions, gives the message that contains them, and reduces the
    messages of all ranks to the result.

    Args:
        name: the name of the method.
        text: the call with its arguments; the same on all ranks.
        keys: function from the world size to the keys of all contributions.
        contribute: returns the contribution of a key; called on the rank that owes it.
        op: the operation that reduces the contributions: ``sum``, ``mean``, ``max`` or ``min``.
    """

    def __init__(
        self,
        name: str,
        text: str,
        keys: Callable[[int], range],
        contribute: Callable[[int], Any] = lambda key: None,
        op: str = "sum",
    ) -> None:
        self.name, self.text = name, text
        self._keys, self._contribute, self._op = keys, contribute, op
        self._parts: dict[int, Packed] = {}

    def own_keys(self, rank: int, world: int) -> list[int]:
        """Return the keys that ``rank`` contributes."""
        return [key for key in self._keys(world) if key % world == rank]

    def compute(self, rank: int, world: int, *, evenly: bool = False) -> None:
        """Compute and keep the contributions that this rank owes and does not have yet.

        Args:
            evenly: call the user's function as often as the rank with most keys does, and drop the
                surplus: a sharded model needs all ranks for each forward pass.

        Raises:
            BadInput: if the user's function returns a value that cannot be sent.
        """
        keys, own_keys = self._keys(world), self.own_keys(rank, world)
        for key in own_keys:
            if key not in self._parts:
                self._parts[key] = pack(self.name, self._contribute(key))
        for _ in range(math.ceil(len(keys) / world) - len(own_keys) if evenly else 0):
            self._contribute((own_keys or keys)[-1])

    def row(self, step: int, number: int, rank: int, world: int) -> bytes:
        """Return the message of this rank to all others, encoded. Call it after :meth:`compute`.

        Args:
            number: the number of the call since the last commit.
        """
        parts = {key: self._parts[key] for key in self.own_keys(rank, world)}
        return msgspec.msgpack.encode(_Row(step, number, self.text, parts))

    def conclude(self, rows: Sequence[bytes]) -> bytes:
        """Return the result that follows from all contributions, encoded for the log.

        Args:
            rows: the messages of all ranks.

        Raises:
            BadInput: on every rank, if the ranks make different calls, or contribute values of
                different types or shapes.
        """
        messages = [_rows.decode(row) for row in rows]
        calls = [(row.call, row.number, row.step) for row in messages]
        if differing_rank := next(
            (rank for rank, call in enumerate(calls) if call != calls[0]), None
        ):
            problem = " and ".join(
                f"rank {rank} made trainer.{call} as call {number} since step {step}"
                for rank, (call, number, step) in (
                    (0, calls[0]),
                    (differing_rank, calls[differing_rank]),
                )
            )
            raise self.refusal(problem)
        parts = {key: part for row in messages for key, part in row.parts.items()}
        if not parts:
            return msgspec.msgpack.encode(_Result(self.text, None))
        return msgspec.msgpack.encode(_Result(self.text, self._reduce(parts)))

    def _reduce(self, parts: Mapping[int, Packed]) -> Packed:
        """Return the contributions, reduced in the order of their keys.

        Raises:
            BadInput: if they differ in type or shape.
        """
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
        """Return the value that user code gets; None for a barrier.

        Args:
            result: the result from the log.

        Raises:
            BadInput: if it is the result of another call.
        """
        logged = _results.decode(result)
        if logged.call != self.text:
            raise self.refusal(
                f"this rank calls trainer.{self.text} where others have called trainer.{logged.call}"
            )
        return logged.packed.value if logged.packed is not None else None

    def refusal(self, problem: str) -> BadInput:
        """Return the error for ranks that make different calls."""
        remedy = (
            "make the same calls in the same order on every rank, even if few ranks need the "
            f"result: {problem}"
        )
        return BadInput(self.name, self.text, remedy)


def all_reduce(value: Any, op: str, shards: int | None) -> Call:
    """Return the call of :meth:`Trainer.all_reduce <chaoskit.Trainer.all_reduce>`.

    Raises:
        BadInput: if an argument is not valid.
    """
    if op not in _COMBINE:
        raise BadInput("all_reduce.op", op, f"use one of {', '.join(_COMBINE)}")
    if shards is None:
        pack("all_reduce", value)  # refuses a bad value, or a function, before anything is sent
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
    """Return the call of :meth:`Trainer.broadcast <chaoskit.Trainer.broadcast>`.

    Computing the call raises BadInput if ``source`` is outside of the world.

    Raises:
        BadInput: if an argument is not valid.
    """
    if source < 0:
        raise BadInput("broadcast.source", source, "use the number of a rank, from 0")
    if not callable(value):
        pack("broadcast", value)

    def keys(world: int) -> range:
        if source >= world:
            raise BadInput(
                "broadcast.source",
                source,
                f"use a rank below {world}, the world size; rank 0 always exists",
            )
        return range(source, source + 1)

    return Call(
        "broadcast",
        f"broadcast(source={source})",
        keys,
        lambda rank: value() if callable(value) else value,
    )


def barrier() -> Call:
    """Return the call of :meth:`Trainer.barrier <chaoskit.Trainer.barrier>`."""
    return Call("barrier", "barrier()", lambda world: range(0))


@contextmanager
def explain_missing_group() -> Iterator[None]:
    """Replace torch's error about a missing process group by one that names the calls to use.

    Other errors of the block are raised unchanged.

    Raises:
        JobFailed: if the block uses a process group of torch, of which a job has none.
    """
    try:
        yield
    except ValueError as error:
        if not any(text in str(error) for text in _NO_GROUP):
            raise
        raise JobFailed(
            "torch.distributed has no process group in this job: leave out init_process_group and "
            "DistributedDataParallel, and use trainer.rank; to exchange values, call "
            "trainer.all_reduce, trainer.broadcast or trainer.barrier after a transaction"
        ) from error
