"""The state of a ZeroOptimizer as one whole, as the plain optimizer would have it: gathered from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from chaoskit.checkpoint.arena import dtype_named
from chaoskit.checkpoint.layout import Box, whole
from chaoskit.runtime.zero.exchange import Exchange

#: By number of the parameter: the part of this rank, and what is remembered of it.
Parts = dict[int, tuple[Box, dict[str, Any]]]

_Told = dict[int, dict[str, tuple[str, float | int | None]]]  # type, and value of a scalar
_told = msgspec.msgpack.Decoder(_Told)


def gather(parts: Parts, shapes: Sequence[tuple[int, ...]], exchange: Exchange, device: torch.device) -> dict[int, Any]:
    """What all ranks remember, on every one of them. A collective: a small one for each tensor.

    Raises:
        RuntimeError: if a rank is lost meanwhile.
    """
    mine = {
        number: {key: _tell(value) for key, value in state.items()} for number, (_, state) in parts.items() if state
    }
    merged: _Told = {}
    for told in _tell_all(mine, exchange, device):
        for number, keys in told.items():
            merged[number] = keys | merged.get(number, {})
    found: dict[int, dict[str, Any]] = {}
    for number, keys in sorted(merged.items()):
        found[number] = {}
        for key, (dtype, value) in sorted(keys.items()):
            if value is None:
                full = torch.zeros(shapes[number], dtype=dtype_named(dtype), device=device)
                if number in parts:
                    box, state = parts[number]
                    full[box.within(whole(shapes[number]))] = state[key]
                exchange.add_up(full.view(-1).view(torch.uint8))  # each byte meets zeros only
                found[number][key] = full
            else:
                found[number][key] = torch.tensor(value, dtype=dtype_named(dtype))
    return found


def _tell(value: Tensor) -> tuple[str, float | int | None]:
    return str(value.dtype).removeprefix("torch."), None if value.dim() else value.item()


def _tell_all(mine: _Told, exchange: Exchange, device: torch.device) -> list[_Told]:
    data = msgspec.msgpack.encode(mine)
    sizes = torch.zeros(exchange.size, dtype=torch.int64, device=device)
    sizes[exchange.rank] = len(data)
    exchange.add_up(sizes)
    lines = torch.zeros(exchange.size, int(sizes.max()), dtype=torch.uint8, device=device)
    lines[exchange.rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    exchange.add_up(lines)
    return [_told.decode(line[:size].numpy()) for line, size in zip(lines.cpu(), sizes.tolist(), strict=True)]
