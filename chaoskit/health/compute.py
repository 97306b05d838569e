"""A fixed computation whose bits must come out the same, again and again, and on every node of one kind."""

from __future__ import annotations

import time

import msgspec
import xxhash

from chaoskit.health.finding import at_most, bad, good
from chaoskit.health.limits import Limits
from chaoskit.wire.messages import Finding

_SIZE = 96
_ROUNDS = 3
#: What the integers come to on a processor that works, whatever its kind.
KNOWN_INTEGERS = "6ffd588330702444"


class ComputeReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``integers``, ``floats``: digests of each round. ``elapsed_ms``: of the fastest round."""

    integers: tuple[str, ...]
    floats: tuple[str, ...]
    elapsed_ms: float


def integers_digest() -> str:
    """Products and sums of 64-bit integers that wrap around: exact, so that every processor must agree."""
    import torch

    with torch.inference_mode():
        count = torch.arange(_SIZE * _SIZE, dtype=torch.int64, device="cpu")
        numbers = (count * 2862933555777941757 + 3037000493).view(_SIZE, _SIZE)
        for _ in range(2):
            numbers = numbers @ numbers.T + (numbers >> 7)
        return xxhash.xxh3_64_hexdigest(numbers.numpy().tobytes())


def floats_digest(device: str = "cpu") -> str:
    """Matrix products, a softmax and sums: the same on nodes that have the same processor and libraries.

    In float64, on which torch's switches for the precision of float32 have no effect.
    """
    import torch

    with torch.inference_mode():
        count = torch.arange(_SIZE * _SIZE, dtype=torch.int64, device=device)
        numbers = ((count * 7919 % 2003).to(torch.float64) / 2003 - 0.5).view(_SIZE, _SIZE)
        for _ in range(3):
            numbers = torch.softmax(numbers @ numbers.T, dim=1) @ numbers + torch.tanh(numbers)
        total = torch.cat([numbers.flatten(), numbers.sum(dim=0), numbers.sum().view(1)])
        return xxhash.xxh3_64_hexdigest(total.cpu().numpy().tobytes())


def read(rounds: int = _ROUNDS) -> ComputeReading:
    """Compute it a few times on the CPU."""
    integers, floats, elapsed_ms = [], [], []
    for _ in range(rounds):
        began_s = time.monotonic()
        integers.append(integers_digest())
        floats.append(floats_digest())
        elapsed_ms.append((time.monotonic() - began_s) * 1e3)
    return ComputeReading(
        integers=tuple(integers), floats=tuple(floats), elapsed_ms=min(elapsed_ms)
    )


def judge(reading: ComputeReading, limits: Limits, expected_floats: str = "") -> list[Finding]:
    """Whether the processor computes right.

    Args:
        expected_floats: the digest of a node of the same kind; "" where none is known.
    """
    remedy = "keep the node out: its processor or its memory computes wrongly"
    found = []
    if set(reading.integers) != {KNOWN_INTEGERS}:
        text = f"integers come to {', '.join(reading.integers)} instead of {KNOWN_INTEGERS}"
        found.append(bad("compute.integers", "wrong", remedy, text))
    else:
        found.append(good("compute.integers", "right"))
    floats = reading.floats[0]
    if len(set(reading.floats)) > 1:
        text = f"the same computation came to {', '.join(reading.floats)}"
        found.append(bad("compute.floats", "not repeatable", remedy, text))
    elif expected_floats and floats != expected_floats:
        other = (
            "compare processor, torch and its libraries with those of the other nodes; if they are equal, "
            + remedy
        )
        found.append(bad("compute.floats", floats, other, f"another node has {expected_floats}"))
    else:
        found.append(good("compute.floats", floats))
    slow = "see what else runs there, and whether its clock is held down"
    found.append(
        at_most("compute.elapsed_ms", reading.elapsed_ms, warn=limits.compute_warn_ms, remedy=slow)
    )
    return found
