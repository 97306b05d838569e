"""Copies from CUDA tensors into a slot: on a stream of their own, into memory that the device can write by itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from chaoskit.checkpoint.layout.arena import ArenaImage, Slot
from chaoskit.checkpoint.layout.finite import SUMMABLE, largest
from chaoskit.checkpoint.layout.held import HeldTensor

_streams: dict[torch.device, torch.cuda.Stream] = {}


class DeviceCopies:
    """The copies of one snapshot, under way on the side stream of each device."""

    def __init__(
        self, events: list[tuple[torch.device, torch.cuda.Event]], extremes: list[Tensor]
    ) -> None:
        self._events, self._extremes = events, extremes

    @classmethod
    def start(
        cls,
        tensors: Sequence[HeldTensor],
        slots: Sequence[Slot],
        image: ArenaImage,
        *,
        check_finite: bool = False,
    ) -> DeviceCopies | None:
        """Enqueue them behind what the current streams do; None if no tensor is on a CUDA device.

        Args:
            check_finite: look for NaN and infinity on the device, too, which is a few kernels for all tensors.
        """
        if not any(held.tensor.is_cuda for held in tensors):
            return None
        copied = [
            (held.tensor, target)
            for held, target in zip(tensors, _targets(slots, image), strict=True)
            if held.tensor.is_cuda and held.tensor.numel()
        ]
        _pin(image)
        events, extremes = [], []
        for device in {source.device for source, _ in copied}:
            stream = _stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.no_grad():
                here = [(source, target) for source, target in copied if source.device == device]
                for source, target in here:
                    target.copy_(source, non_blocking=True)
                if check_finite and (
                    looked_at := [source for source, _ in here if source.dtype in SUMMABLE]
                ):
                    extremes.append(largest(looked_at).to("cpu", non_blocking=True))
            events.append((device, stream.record_event()))
        return cls(events, extremes)

    def hold_back(self) -> None:
        """Let the current streams change the tensors only after the copies; the host goes on."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def arrive(self) -> bool:
        """Return when everything has arrived: whether it was found to be finite. False where that was not asked."""
        for _, event in self._events:
            event.synchronize()
        return bool(self._extremes) and all(math.isfinite(float(each)) for each in self._extremes)


_known_targets: weakref.WeakKeyDictionary[
    ArenaImage, tuple[object, Sequence[Slot], list[Tensor]]
] = weakref.WeakKeyDictionary()


def _targets(slots: Sequence[Slot], image: ArenaImage) -> list[Tensor]:
    """The place of each tensor; made once for each layout of each image, as it takes longer than to begin a copy."""
    known = _known_targets.get(image)
    if known is not None and known[0] is image.map and known[1] is slots:
        return known[2]
    targets = [image.tensor(slot) for slot in slots]
    _known_targets[image] = (image.map, slots, targets)
    return targets


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


# -- memory that the device can write ---------------------------------------------------------------------------------

_registered: weakref.WeakKeyDictionary[ArenaImage, weakref.finalize[[object, int], ArenaImage]] = (
    weakref.WeakKeyDictionary()
)


def _pin(image: ArenaImage) -> None:
    """Register the data of ``image`` with CUDA. Where that fails, copies go through the driver's own buffers.

    The registration keeps the mapping, which is unmapped after it has ended, and never before: the next mapping may get
    the same addresses, and CUDA would still write to the pages that were there.
    """
    known = _registered.get(image)
    if known is not None:
        if (kept := known.peek()) is not None and kept[2][0] is image.map:
            return
        known()  # the image has grown, and is mapped elsewhere
    _forget_error(torch.cuda.cudart().cudaHostRegister(image.address, image.capacity_bytes, 0))
    end = weakref.finalize(image, _unregister, image.map, image.address)
    end.atexit = False  # the end of the process ends all registrations
    _registered[image] = end


def _unregister(mapping: object, address: int) -> None:
    """``mapping`` is held until here."""
    _forget_error(torch.cuda.cudart().cudaHostUnregister(address))


def _forget_error(status: object) -> None:
    """CUDA reports an error once more at the next launch of a kernel, which would be one of the user's."""
    if status != torch.cuda.cudart().cudaError.success:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
