"""The part of a snapshot that one process writes: a file of tensors, straight from their memory.

-> ``disk/staging.py``: commits the parts of all processes. ``disk/container.py``: bytes around a
tensor. ``remote/parts.py``: parts of an upload, which are ranges of bytes.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from chaoskit.checkpoint.disk.container import wrap
from chaoskit.checkpoint.disk.files import DigestedFile
from chaoskit.checkpoint.layout.boxes import Box
from chaoskit.checkpoint.layout.manifest import Item, Part
from chaoskit.checkpoint.layout.raw import tensor_bytes
from chaoskit.errors import BadInput


class PartWriter:
    """A writer of one file of a snapshot.

    Use it as a context manager: without :meth:`finish` the file is removed on exit. The memory that
    is added must not change until :meth:`finish` returns.
    """

    def __init__(self, file: DigestedFile) -> None:
        self._file = file
        self._items: list[Item] = []

    def add_tensor(
        self, path: str, tensor: Tensor, *, shape: tuple[int, ...] = (), start: tuple[int, ...] = ()
    ) -> Item:
        """Append a tensor, or a box of one, to the file. Return its item for the manifest.

        A contiguous tensor in this host's memory is not copied.

        Args:
            path: name in the state dict.
            tensor: the whole tensor, or the box of it that this process holds.
            shape: shape of the whole tensor, for a box.
            start: start of the box in the whole tensor.

        Raises:
            BadInput: if the tensor has no dense bytes, or the box does not lie in the whole.
            OSError: if the disk is full or fails.
        """
        box = Box(start or (0,) * tensor.dim(), tuple(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self.add_box(path, tensor_bytes(tensor, path), dtype, box, shape or box.extent)

    def add_box(
        self, path: str, data: memoryview, dtype: str, box: Box, shape: tuple[int, ...]
    ) -> Item:
        """Append a box of a tensor from memory that is no tensor, such as an arena's.

        Return its item for the manifest.

        Args:
            data: the elements of the box, in order, as bytes.
            dtype: type of the elements, such as ``float32``.
            shape: shape of the whole tensor.

        Raises:
            BadInput: if the box does not lie in the whole.
            OSError: if the disk is full or fails.
        """
        if len(shape) != len(box.extent) or any(
            last > most for last, most in zip(box.stop, shape, strict=True)
        ):
            raise BadInput(
                path,
                f"{box.extent} at {box.start} of {shape}",
                "give the shape of the whole tensor",
            )
        first = self._file.size_bytes
        container = wrap(dtype, box.extent, len(data), first)
        for piece in (container.head, data, container.tail):
            self._file.append(piece)
        item = Item(
            path=path,
            file=self._file.name,
            offset=first + len(container.head),
            size_bytes=len(data),
            container=(first, self._file.size_bytes - first),
            dtype=dtype,
            shape=shape,
            start=box.start,
            extent=box.extent,
        )
        self._items.append(item)
        return item

    def add_object(self, path: str, data: bytes | memoryview) -> Item:
        """Append opaque bytes, such as an object that ``torch.save`` has serialised.

        Return their item for the manifest, which has no type and no shape.

        Raises:
            OSError: if the disk is full or fails.
        """
        first = self._file.size_bytes
        self._file.append(data)
        item = Item(path, self._file.name, first, len(data), (first, len(data)))
        self._items.append(item)
        return item

    def finish(self) -> Part:
        """Close the file. Return its entry and all items once it is on the disk.

        Raises:
            OSError: if the disk is full or fails.
        """
        return Part((self._file.close(),), tuple(self._items))

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.discard()
