"""Messages of GPU arrays and of arrays with gaps, on a GPU made of host memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit import (
    Communicator,
    InvalidArgument,
    MessageTruncated,
    TransferTimeout,
    UnsupportedError,
    device_mail,
    device_side,
    device_stock,
    lending,
)
from rdmakit.device_mail import DeviceMail
from rdmakit.request import Request
from rdmakit.status import ANY_SOURCE, ANY_TAG, Status
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import with_gpus
from tests.conformance.messages import CASES, raises, ring, values
from tests.conformance.ranks import with_comm

PIECE, SMALL = 1 << 10, 1 << 7
WAYS = {
    "node": {}, "denied": {"denied": True}, "direct": {"direct": True}, "lent": {"lent": True},
    "lent, direct": {"lent": True, "direct": True},
}  # fmt: skip
_CALLS = {
    "Send", "Recv", "Isend", "Irecv", "Sendrecv", "Sendrecv_replace", "Send_init", "Recv_init"
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMail.__init__, "__kwdefaults__", {"piece": PIECE, "small": SMALL})
    monkeypatch.setattr(device_mail, "LEAST", SMALL)
    for module in (lending, device_side):
        monkeypatch.setattr(module, "SLOT", PIECE)
    monkeypatch.setattr(lending, "_STEP", PIECE // 4)


class OnGpu:
    """A communicator whose messages take the NumPy arrays they are given as GPU memory."""

    def __init__(self, comm: Communicator, chosen: Callable[[], bool]) -> None:
        self._comm, self._chosen = comm, chosen

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in _CALLS:
            return found

        def call(*args: Any, **named: Any) -> Any:
            turned = (Array(x) if isinstance(x, np.ndarray) and self._chosen() else x for x in args)
            return found(*turned, **named)

        return call


@pytest.mark.parametrize(
    ("sizes", "way", "who"),
    [
        ([1], "node", "in turn"),
        ([2], "node", "all"),
        ([2], "node", "even ranks"),
        ([2], "denied", "in turn"),
        ([2], "lent", "all"),
        ([3], "lent", "in turn"),
        ([2, 1], "lent, direct", "even ranks"),
        ([1, 1], "node", "all"),
        ([1, 1], "direct", "all"),
        ([2, 1], "direct", "in turn"),
        ([2, 2], "node", "even ranks"),
        ([2, 2], "direct", "even ranks"),
    ],
    ids=str,
)
def test_what_host_arrays_do(
    sizes: list[int], way: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cases of host arrays, of which all or some are GPU memory."""
    sizes_ = {"piece": 1 << 16, "small": 1 << 10}  # the longest messages have 5 MB
    monkeypatch.setattr(DeviceMail.__init__, "__kwdefaults__", sizes_)

    def body(comm: Communicator) -> None:
        turn = iter(range(1 << 30))
        chosen = {
            "all": lambda: True,
            "even ranks": lambda: comm.rank % 2 == 0,
            "in turn": lambda: next(turn) % 2 == 0,
        }[who]
        for case in CASES:
            case(OnGpu(comm, chosen))  # type: ignore[arg-type]
            comm.Barrier()

    with_gpus(sizes, body, **WAYS[way])


@pytest.mark.parametrize("way", ["node", "direct", "lent"])
@pytest.mark.parametrize("sizes", [[2], [1, 1]], ids=str)
def test_sizes_around_pieces(sizes: list[int], way: str) -> None:
    """Each kind of memory on each side; several under way with one tag, in their order."""
    counts = [n + d for n in (SMALL, PIECE, 2 * PIECE, 9 * PIECE) for d in (-1, 0, 1)] + [0, 1]

    def body(comm: Communicator) -> None:
        other = 1 - comm.rank
        for mine, theirs in ((Array, Array), (Array, _same), (_same, Array)):
            wrap, unwrap = (mine, theirs) if comm.rank == 0 else (theirs, mine)
            got = [np.full(n, 99, np.uint8) for n in counts]
            receives = [comm.Irecv(unwrap(y), other, 1) for y in got]
            sends = [
                comm.Isend(wrap(values(n, comm.rank, "u1", i)), other, 1)
                for i, n in enumerate(counts)
            ]
            statuses: list[Status] = []
            Request.Waitall(receives, statuses)
            Request.Waitall(sends)
            for i, (n, y) in enumerate(zip(counts, got, strict=True)):
                assert (y == values(n, other, "u1", i)).all(), n
                assert statuses[i].nbytes == n

    with_gpus(sizes, body, **WAYS[way])


def _same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("way", ["node", "lent"])
@pytest.mark.parametrize("wraps", [True, False], ids=["gpu-first", "host-first"])
def test_messages_keep_their_order_among_kinds(wraps: bool, way: str) -> None:
    """A host message that is sent after a slow GPU message does not pass it."""

    def body(comm: Communicator) -> None:
        after, before = ring(comm)
        sends = []
        for i in range(12):
            x = values(700 + i, comm.rank, salt=i)
            sends.append(comm.Isend(Array(x) if i % 2 == wraps else x, after, 4))
        for i in range(12):
            y, status = np.zeros(800), Status()
            assert comm.Probe(ANY_SOURCE, ANY_TAG, status)
            assert (status.source, status.tag, status.nbytes) == (before, 4, 8 * (700 + i))
            comm.Recv(y if i % 3 else Array(y), ANY_SOURCE, ANY_TAG, status)
            assert status.nbytes == 8 * (700 + i)
            assert (y[: 700 + i] == values(700 + i, before, salt=i)).all()
            assert (y[700 + i :] == 0).all()
        Request.Waitall(sends)

    with_gpus([2, 1], body, **WAYS[way])


def views(count: int, dtype: str, layout: str) -> np.ndarray[Any, Any]:
    """Return ``count`` elements, a multiple of 6, in a view of ``layout``."""
    rows = max(1, count // 6)
    if layout == "C":
        return np.full((rows, 6), 99, dtype)
    if layout == "F":
        return np.full((6, rows), 99, dtype).T
    if layout == "reversed":
        return np.full((rows, 6), 99, dtype)[::-1, ::-1]
    if layout == "column":
        return np.full((rows * 6, 5), 99, dtype)[:, 3]
    return np.full((rows, 4, 14), 99, dtype)[:, 1, -2:1:-2]


LAYOUTS = ("C", "F", "reversed", "column", "steps")


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from(["u1", "f2", "i4", "f8", "c16", "V6", "i4,f8"]),
    sizes=st.sampled_from([[2], [1, 1]]),
    way=st.sampled_from(["node", "direct", "lent"]),
)
def test_any_strides_on_both_sides(
    data: st.DataObject, dtype: str, sizes: list[int], way: str
) -> None:
    count = 6 * data.draw(st.integers(1, 90))
    layouts = data.draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 4))
    gpu = data.draw(st.tuples(*[st.booleans()] * 4))
    kind = np.dtype(dtype)

    def fill(rank: int) -> np.ndarray[Any, Any]:
        return ((np.arange(count * kind.itemsize) * 3 + rank * 7) % 251).astype("u1").view(kind)

    def body(comm: Communicator) -> None:
        other, me = 1 - comm.rank, comm.rank
        out, into = (views(count, dtype, layouts[2 * me + i]) for i in (0, 1))
        around = into.base if into.base is not None else into
        before = np.array(around)
        out[...] = fill(me).reshape(out.shape)
        sent = out.copy()
        send, recv = (
            Array(x) if on else x for x, on in zip((out, into), gpu[2 * me :], strict=False)
        )
        comm.Sendrecv(send, other, 1, recv, other, 1)
        assert np.ascontiguousarray(into).tobytes() == fill(other).tobytes()
        assert out.tobytes() == sent.tobytes()
        into[...] = views(count, dtype, "C").reshape(into.shape)
        assert np.array(around).tobytes() == before.tobytes(), "written between the elements"
        if me == 0:
            comm.Send(send, other, 2)
            comm.Recv(recv, other, 2)
        else:
            comm.Recv(recv, other, 2)
            comm.Send(recv, other, 2)
        got = fill(0).tobytes()
        assert np.ascontiguousarray(into).tobytes() == got

    with_gpus(sizes, body, **WAYS[way])


@pytest.mark.parametrize("way", ["node", "lent"])
@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "host"])
@pytest.mark.parametrize("nbytes", [0, 1, 8, 21, 800, 1237, 3200])
def test_a_shorter_message_fills_the_first_elements(nbytes: int, on_gpu: bool, way: str) -> None:
    def body(comm: Communicator) -> None:
        after, before = ring(comm)
        whole = np.full((20, 40), 7.5)
        part = whole[::-1, 1::2]
        want = part.copy()
        want.reshape(-1).view("u1")[:nbytes] = values(nbytes, before, "u1")
        status = Status()
        send = comm.Isend(values(nbytes, comm.rank, "u1"), after, 0)
        comm.Recv(Array(part) if on_gpu else part, before, 0, status)
        assert status.nbytes == nbytes
        np.testing.assert_array_equal(part.view("u8"), want.view("u8"))
        assert (whole[:, ::2] == 7.5).all()
        send.Wait()
        long = comm.Isend(Array(np.zeros(401)), after, 1)
        with raises(MessageTruncated, "message of 3208 bytes"):
            comm.Recv(Array(part) if on_gpu else part, before, 1)
        np.testing.assert_array_equal(part.view("u8"), want.view("u8"))
        long.Wait()

    with_gpus([2], body, **WAYS[way])


def test_strided_host_arrays_without_a_gpu() -> None:
    def body(comm: Communicator) -> None:
        after, before = ring(comm)
        for count in (1, 300, 20_000):
            x = np.full((count, 3), -1.0)
            x[:, 1] = values(count, comm.rank)
            y = np.full((4, count), -1.0)
            send = comm.Isend(x[:, 1], after, 2)
            if count > 1:
                x[:, 1] = 0  # gathered at the start
            comm.Recv(y[2, ::-1], before, 2)
            send.Wait()
            assert (y[2, ::-1] == values(count, before)).all()
            assert (y[[0, 1, 3]] == -1).all()
            assert (x[:, ::2] == -1).all()
            z = np.full((count, 2), float(comm.rank))
            comm.Sendrecv_replace(z[:, 0], after, 3, before, 3)
            assert (z == [[before, comm.rank]]).all()
            send_init, recv_init = (
                comm.Send_init(z[:, 1], after, 5),
                comm.Recv_init(x[:, 2], before),
            )
            for turn in range(3):
                z[:, 1] = turn + comm.rank
                recv_init.Start()
                send_init.Start()
                recv_init.Wait()
                send_init.Wait()
                assert (x[:, 2] == turn + before).all()
        frozen = np.zeros((4, 4))
        frozen.flags.writeable = False
        with raises(InvalidArgument, "read-only"):
            comm.Recv(frozen[:, 1], before)
        same = np.lib.stride_tricks.as_strided(np.zeros(9), (4, 4), (8, 8))
        with raises(InvalidArgument, "several elements in one place"):
            comm.Irecv(same, before)
        y = np.zeros(16)
        comm.Sendrecv(same, after, 6, y, before, 6)
        # Taken back: nothing is written.
        request = comm.Irecv(x[:, 0], before, 99)
        request.Cancel()
        request.Wait()

    for sizes in ([1], [3], [2, 1]):
        with_comm(sizes, body)


@pytest.mark.parametrize("way", ["node", "direct", "lent"])
@pytest.mark.parametrize("sizes", [[2], [1, 1]], ids=str)
def test_the_work_before_is_done_first(sizes: list[int], way: str) -> None:
    """What the stream has at the start is seen by a send, and comes before a receive."""

    def body(comm: Communicator) -> None:
        other, door = 1 - comm.rank, comm._gpus.gpu.door
        x, y, z = np.zeros(3000), np.zeros((3000, 2)), np.zeros(3000)
        door.queue.append(lambda: x.__setitem__(slice(None), values(3000, comm.rank)))
        send = comm.Isend(Array(x), other)
        y[:, 1] = 5  # before: the progress thread may work the queue off at any time
        door.queue.append(lambda: z.__setitem__(slice(None), y[:, 1]))
        receive = comm.Irecv(Array(y[:, 1]), other)
        Request.Waitall([send, receive])
        assert (y == np.stack([np.zeros(3000), values(3000, other)], axis=1)).all()
        assert (z == 5).all()

    with_gpus(sizes, body, **WAYS[way])


def test_messages_before_and_between_collectives() -> None:
    """No call in common is needed: only two of three ranks have GPU arrays at all."""

    def body(comm: Communicator) -> None:
        if comm.rank < 2:
            y = np.zeros(900)
            x = Array(values(900, comm.rank))
            comm.Sendrecv(x, 1 - comm.rank, 1, Array(y), 1 - comm.rank, 1)
            assert (y == values(900, 1 - comm.rank)).all()
        assert not comm._gpus._tried
        x, y = Array(np.full(700, comm.rank + 1.0)), Array(np.zeros(700))
        for turn in range(3):
            after, before = ring(comm)
            got = np.zeros((700, 2))
            receive = comm.Irecv(Array(got[:, turn % 2]), before, turn)
            comm.Allreduce(x, y)
            send = comm.Isend(y, after, turn)
            comm.synchronize()
            Request.Waitall([send, receive])
            assert (y.array == 6).all()
            assert (got[:, turn % 2] == 6).all()

    with_gpus([2, 1], body)


def test_refused_by_name() -> None:
    def body(comm: Communicator) -> None:
        after, before = ring(comm)
        door = comm._gpus.gpu.door
        x = Array(np.zeros(5))
        door.capturing = True
        for call in (
            lambda: comm.Send(x, after),
            lambda: comm.Irecv(x, before),
            lambda: comm.Sendrecv_replace(x, after, 0, before, 0),
        ):
            with raises(UnsupportedError, "cannot be captured into a CUDA graph"):
                call()
        door.capturing = False
        with raises(InvalidArgument, "stream: expected a CUDA stream"):
            comm.Send(x, after, stream="one")
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        with raises(InvalidArgument, "read-only"):
            comm.Recv(Array(frozen), before)
        with raises(UnsupportedError, "plain bytes"):
            comm.Send(Array(np.zeros(3, object)), after)
        door.why_not = lambda: "no driver"
        comm._gpus.device = -1
        comm._gpus._seen.clear()
        with raises(UnsupportedError, "cannot be used here: no driver"):
            comm.Send(x, after)
        comm.Sendrecv(np.zeros(2), after, 1, np.zeros(2), before, 1)  # still usable

    with_gpus([2], body)


def test_memory_is_used_again_and_kept_after_an_error() -> None:
    def body(comm: Communicator) -> None:
        other, mail = 1 - comm.rank, None
        taken: list[int] = []
        x, y = np.zeros((2000, 2)), np.zeros((2, 2000))
        for turn in range(10):
            x[:, 0] = turn + comm.rank
            comm.Sendrecv(Array(x[:, 0]), other, 1, Array(y[0, ::-1]), other, 1)
            assert (y[0] == turn + other).all()
            comm.Irecv(Array(x[:, 1]), other, 98).Cancel()
            mail = comm._gpus.mail
            taken.append(len(mail._memory) + len(mail._all_events))
        assert taken[1] == taken[-1], taken
        comm.Barrier()
        if comm.rank == 0:
            big = np.zeros(5000)
            array = Array(big)
            pending = comm.Isend(array, other, 50)
            receive = comm.Irecv(array, other, 51)
            with pytest.raises(TransferTimeout):
                pending.Wait(timeout=0.2)
            assert receive.done
            del array, big
            gc.collect()
            assert any(each[0] is mail for each in device_stock._QUARANTINE)  # type: ignore[index]
        else:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                time.sleep(0.02)
        comm._state.failure = comm._state.failure or "the other gave up"

    with_gpus([1, 1], body)


def test_more_messages_than_pinned_pieces() -> None:
    """None waits for the end of another, in whatever order they are received."""

    def body(comm: Communicator) -> None:
        after, before = ring(comm)
        n, count = 60, 900
        sends = [comm.Isend(Array(values(count, comm.rank, salt=i)), after, i) for i in range(n)]
        for i in reversed(range(n)):
            y = np.zeros(count)
            comm.Recv(Array(y) if i % 2 else y, before, i)
            assert (y == values(count, before, salt=i)).all()
        Request.Waitall(sends)

    with_gpus([2], body)
