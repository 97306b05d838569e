"""Probe of the processor: a fixed computation whose bits are equal on all nodes of the same kind.

-> ``health/examine.py``: runs it before a run. ``runtime/integrity/``: wrong numbers during a run.
"""

from __future__ import annotations

import time

import msgspec
import xxhash

from chaoskit.health.finding import at_most, bad, good
from chaoskit.health.limits import HealthLimits
from chaoskit.wire.messages import Finding

_SIZE = 96
_ROUNDS = 3
#: Digest of the integers on every processor that works.
KNOWN_INTEGERS = "6ffd588330702444"


class ComputeReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Digests of the computation.

    Attributes:
        integers, floats: digests of each round, in hexadecimal; equal in all rounds if the
            processor works.
        elapsed_ms: time of the fastest round.
    """

    integers: tuple[str, ...]
    floats: tuple[str, ...]
    elapsed_ms: float


def integers_digest() -> str:
    """Return the digest of products and sums of 64-bit integers that wrap around, in hexadecimal.

    They are exact, so a processor that works returns :data:`KNOWN_INTEGERS`.
    """
    import torch

    with torch.inference_mode():
        count = torch.arange(_SIZE * _SIZE, dtype=torch.int64, device="cpu")
        numbers = (count * 2862933555777941757 + 3037000493).view(_SIZE, _SIZE)
        for _ in range(2):
            numbers = numbers @ numbers.T + (numbers >> 7)
        return xxhash.xxh3_64_hexdigest(numbers.numpy().tobytes())


def floats_digest(device: str = "cpu") -> str:
    """Return the digest of matrix products, a softmax and sums, in hexadecimal.

    It is equal on nodes with the same processor and libraries. The numbers are float64, on which
    torch's switches for the precision of float32 have no effect.
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
    """Run the computation ``rounds`` times on the CPU, and return digests and the shortest time."""
    integers, floats, elapsed_ms = [], [], []
    for _ in range(rounds):
        began_s = time.monotonic()
        integers.append(integers_digest())
        floats.append(floats_digest())
        elapsed_ms.append((time.monotonic() - began_s) * 1e3)
    return ComputeReading(
        integers=tuple(integers), floats=tuple(floats), elapsed_ms=min(elapsed_ms)
    )


def judge(
    reading: ComputeReading, limits: HealthLimits, expected_floats: str = ""
) -> list[Finding]:
    """Return the findings on the correctness and speed of the processor.

    Wrong or varying digests are bad; a slow computation is a warning.

    Args:
        expected_floats: the digest of a node of the same kind; "" if none is known.
    """
    remedy = "keep the node out: its processor or its memory computes wrongly"
    findings = []
    if set(reading.integers) != {KNOWN_INTEGERS}:
        detail = f"the digests are {', '.join(reading.integers)} instead of {KNOWN_INTEGERS}"
        findings.append(bad("compute.integers", "wrong", remedy, detail))
    else:
        findings.append(good("compute.integers", "right"))
    floats = reading.floats[0]
    if len(set(reading.floats)) > 1:
        detail = f"the digests of the same computation are {', '.join(reading.floats)}"
        findings.append(bad("compute.floats", "not repeatable", remedy, detail))
    elif expected_floats and floats != expected_floats:
        other_remedy = (
            "compare processor, torch and its libraries with those of the other nodes; if they are equal, "
            + remedy
        )
        findings.append(
            bad("compute.floats", floats, other_remedy, f"another node has {expected_floats}")
        )
    else:
        findings.append(good("compute.floats", floats))
    slow_remedy = "check for other processes on the node, and for a throttled processor clock"
    findings.append(
        at_most(
            "compute.elapsed_ms",
            reading.elapsed_ms,
            warn=limits.compute_warn_ms,
            remedy=slow_remedy,
        )
    )
    return findings
