"""What messages between two ranks make of the arrays they are given.

Contiguous host memory goes as it is. Elements with gaps between them are gathered into memory of
the message's own when it is sent, and scattered when it is there, in C order: both sides may have
other strides, or none. GPU memory: :mod:`rdmakit.device_mail`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.buffer import Buffer, as_buffer, bytes_at, strided_at
from rdmakit.datatypes import MemoryKind
from rdmakit.device_side import DeviceSide, stream_of
from rdmakit.errors import UnsupportedError
from rdmakit.long_mail import Incoming, Moved, Outgoing, Parts, receive_into
from rdmakit.protocols import Arrived, Bytes, Mail, Request

__all__ = ["incoming", "message", "outgoing"]


def message(buf: object, name: str, *, writable: bool) -> Buffer:
    """Describe an array of plain elements.

    Raises:
        InvalidArgument: as :func:`rdmakit.buffer.as_buffer`.
        UnsupportedError: its elements are no plain bytes.
    """
    what = as_buffer(buf, name, writable=writable)
    if what.dtype.hasobject or not what.dtype.itemsize:
        raise UnsupportedError(f"elements of type {what.dtype} are not plain bytes")
    return what


def outgoing(
    what: Buffer, side: DeviceSide, stream: object, *, copy: bool = False
) -> Bytes | Outgoing:
    """Return what is sent of an array. Local; with the engine's lock held.

    Args:
        what: the array.
        side: for GPU memory.
        stream: CUDA stream after whose present work the elements are sent.
        copy: the array may be written before the message is sent.

    Raises:
        UnsupportedError: GPU memory that cannot be served, or a stream that is captured.
    """
    if not what.count:
        return bytes_at(0, 0)
    if what.kind is MemoryKind.HOST:
        if what.strided is not None:
            return _gathered(what)
        data = bytes_at(what.address, what.nbytes)
        return data.copy() if copy else data
    number = _begin(what, side, stream, "a message of GPU memory")
    return side.mail.outgoing(what, number, copy=copy)


def incoming(what: Buffer, side: DeviceSide, stream: object) -> Bytes | Incoming:
    """Return what a message is received into. Local; with the engine's lock held.

    The array is written after the present work of ``stream``. Raises as :func:`outgoing`.
    """
    if not what.count:
        return bytes_at(0, 0)
    if what.kind is MemoryKind.HOST:
        if what.strided is not None:
            return _Scattered(what)
        return bytes_at(what.address, what.nbytes)
    number = _begin(what, side, stream, "a message into GPU memory")
    return side.mail.incoming(what, number)


def _begin(what: Buffer, side: DeviceSide, stream: object, call: str) -> int:
    """See that the GPU can serve the array; return the stream's number."""
    side.check("buf", what)
    side.enter()
    found = stream_of(stream, side.gpu.door)
    side.refuse_capture(found, call)
    number: int = found.ptr
    side.follow(number, (what,))
    return number


# -- host arrays with gaps --------------------------------------------------------------------


def _elements(what: Buffer) -> npt.NDArray[Any]:
    """Return the array, its elements as they lie where they have fields."""
    assert what.strided is not None
    fields = what.dtype.names is not None or what.dtype.subdtype is not None
    dtype = np.dtype((np.void, what.dtype.itemsize)) if fields else what.dtype
    return strided_at(what.address, what.strided, dtype)


def _gathered(what: Buffer) -> Bytes:
    view = _elements(what)
    flat = np.empty(what.nbytes, np.uint8)
    np.copyto(flat.view(view.dtype).reshape(view.shape), view)
    return flat


def _scatter(what: Buffer, flat: Bytes) -> None:
    """Put bytes where the first elements lie, in C order; the last may be a part of one."""
    view = _elements(what)
    count, rest = divmod(flat.nbytes, view.itemsize)
    elements = flat[: flat.nbytes - rest].view(view.dtype)
    if count == view.size:
        np.copyto(view, elements.reshape(view.shape))
        return
    view.flat[:count] = elements
    if rest:
        last = np.empty(1, view.dtype)
        last[0] = view.flat[count]
        last.view(np.uint8)[:rest] = flat[flat.nbytes - rest :]
        view.flat[count] = last[0]


class _Scattered:
    """See :class:`rdmakit.long_mail.Incoming`."""

    def __init__(self, what: Buffer) -> None:
        self._what, self.nbytes = what, what.nbytes

    def begin(self, message: Arrived, moved: Moved) -> Parts:
        return _Scattering(self._what, message, moved)

    def drop(self) -> None:
        """Nothing is held."""


class _Scattering:
    """A message that is received into memory of its own, then scattered."""

    def __init__(self, what: Buffer, message: Arrived, moved: Moved) -> None:
        self._what, self._flat = what, np.empty(message.nbytes, np.uint8)
        self._request: Request = receive_into(self._flat, message, moved)

    def done(self) -> bool:
        if not self._request.done():
            return False
        _scatter(self._what, self._flat)
        return True

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        if isinstance(self._request, Parts):
            self._request.abandon(way, keep)
        else:
            way.abandon([self._request], [*keep, self._flat])
