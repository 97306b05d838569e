"""Copy CUDA tensors into a slot, on a side stream, into memory that the device can write.

-> ``memory/copying.py``: copies CPU tensors, and digests the copies of both.
"""

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
    """The copies of one snapshot, under way on the side stream of each device.

    Args:
        events: device and event that is recorded behind the copies on it.
        largest_values: largest absolute value of the checked tensors of each device.
    """

    def __init__(
        self, events: list[tuple[torch.device, torch.cuda.Event]], largest_values: list[Tensor]
    ) -> None:
        self._events, self._largest_values = events, largest_values

    @classmethod
    def start(
        cls,
        tensors: Sequence[HeldTensor],
        slots: Sequence[Slot],
        image: ArenaImage,
        *,
        check_finite: bool = False,
    ) -> DeviceCopies | None:
        """Enqueue the copies behind the work of the current streams, and return a handle to them.

        Return None if there are no CUDA tensors.

        Args:
            check_finite: check for NaN and infinity on the device, which takes a few kernels in
                all.
        """
        if not any(held.tensor.is_cuda for held in tensors):
            return None
        pairs = [
            (held.tensor, target)
            for held, target in zip(tensors, _targets(slots, image), strict=True)
            if held.tensor.is_cuda and held.tensor.numel()
        ]
        _pin(image)
        events, largest_values = [], []
        for device in {source.device for source, _ in pairs}:
            stream = _stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.no_grad():
                on_device = [
                    (source, target) for source, target in pairs if source.device == device
                ]
                for source, target in on_device:
                    target.copy_(source, non_blocking=True)
                if check_finite and (
                    checked := [source for source, _ in on_device if source.dtype in SUMMABLE]
                ):
                    largest_values.append(largest(checked).to("cpu", non_blocking=True))
            events.append((device, stream.record_event()))
        return cls(events, largest_values)

    def hold_back(self) -> None:
        """Make the current streams wait for the copies before they change the tensors.

        The host does not wait.
        """
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def arrive(self) -> bool:
        """Wait for all copies. Return True if the device has checked tensors and all are finite.

        False also means that nothing was checked.
        """
        for _, event in self._events:
            event.synchronize()
        return bool(self._largest_values) and all(
            math.isfinite(float(largest_value)) for largest_value in self._largest_values
        )


_cached_targets: weakref.WeakKeyDictionary[
    ArenaImage, tuple[object, Sequence[Slot], list[Tensor]]
] = weakref.WeakKeyDictionary()


def _targets(slots: Sequence[Slot], image: ArenaImage) -> list[Tensor]:
    """Return the place of each tensor in the slot, as a tensor.

    The result is cached for each layout of each image: making it takes longer than to begin a copy.
    """
    cached = _cached_targets.get(image)
    if cached is not None and cached[0] is image.map and cached[1] is slots:
        return cached[2]
    targets = [image.tensor(slot) for slot in slots]
    _cached_targets[image] = (image.map, slots, targets)
    return targets


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


# -- memory that the device can write --------------------------------------------------------------

_registered: weakref.WeakKeyDictionary[ArenaImage, weakref.finalize[[object, int], ArenaImage]] = (
    weakref.WeakKeyDictionary()
)


def _pin(image: ArenaImage) -> None:
    """Register the data of ``image`` with CUDA.

    If that fails, copies go through the driver's buffers. The registration keeps the mapping alive,
    so the memory is unmapped only after the registration has ended. Otherwise the next mapping
    might get the same addresses while CUDA still writes to the old pages.
    """
    finalizer = _registered.get(image)
    if finalizer is not None:
        if (registered := finalizer.peek()) is not None and registered[2][0] is image.map:
            return
        finalizer()  # the image has grown, and is mapped elsewhere
    _forget_error(torch.cuda.cudart().cudaHostRegister(image.address, image.capacity_bytes, 0))
    end = weakref.finalize(image, _unregister, image.map, image.address)
    end.atexit = False  # the end of the process ends all registrations
    _registered[image] = end


def _unregister(mapping: object, address: int) -> None:
    """End a registration. The argument ``mapping`` keeps the memory mapped until here."""
    _forget_error(torch.cuda.cudart().cudaHostUnregister(address))


def _forget_error(status: object) -> None:
    """Clear a failed status of CUDA.

    CUDA reports an error again at the next launch of a kernel, which would be one of the user's.
    """
    if status != torch.cuda.cudart().cudaError.success:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
