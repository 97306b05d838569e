"""Copies from CUDA tensors into a slot: on a stream of their own, into memory that the device can write by itself."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from chaoskit.checkpoint.arena import DATA_OFFSET, ArenaImage, Slot, dtype_named
from chaoskit.checkpoint.held import HeldTensor

_streams: dict[torch.device, torch.cuda.Stream] = {}


class DeviceCopies:
    """The copies of one snapshot, under way on the side stream of each device."""

    def __init__(self, events: list[tuple[torch.device, torch.cuda.Event]]) -> None:
        self._events = events

    @classmethod
    def start(cls, tensors: Sequence[HeldTensor], slots: Sequence[Slot], image: ArenaImage) -> DeviceCopies | None:
        """Enqueue them behind what the current streams do; None if no tensor is on a CUDA device."""
        devices = {held.tensor.device for held in tensors if held.tensor.is_cuda}
        if not devices:
            return None
        _pin(image)
        for device in devices:
            _stream(device).wait_stream(torch.cuda.current_stream(device))
        for held, slot in zip(tensors, slots, strict=True):
            if held.tensor.is_cuda and slot.size_bytes:
                start = DATA_OFFSET + slot.offset
                target = torch.frombuffer(image.map, dtype=torch.uint8, count=slot.size_bytes, offset=start)
                with torch.cuda.stream(_stream(held.tensor.device)):
                    shaped = target.view(dtype_named(slot.dtype)).view(slot.shape)
                    shaped.copy_(held.tensor.detach(), non_blocking=True)
        return cls([(device, _stream(device).record_event()) for device in devices])

    def hold_back(self) -> None:
        """Let the current streams change the tensors only after the copies; the host goes on."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def synchronize(self) -> None:
        """Return when everything has arrived."""
        for _, event in self._events:
            event.synchronize()


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
