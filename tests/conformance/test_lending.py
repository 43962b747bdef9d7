"""Messages of GPU memory that are lent inside a node, on a GPU made of host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit import Communicator, TransportError, device_mail, device_side, lending
from rdmakit.inter.tags import form_of, formed
from rdmakit.intra.cuda_ipc import Shared
from rdmakit.intra.device_registry import Registry
from rdmakit.lending import SLOTS, Lender, pieces_of
from rdmakit.protocols import Form
from rdmakit.request import Request
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import with_gpus
from tests.conformance.messages import raises, values

SLOT = 1 << 10


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_mail, "LEAST", 64)
    for module in (lending, device_side):
        monkeypatch.setattr(module, "SLOT", SLOT)
    monkeypatch.setattr(lending, "_STEP", SLOT // 4)


def told(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Form]]:
    """Return a list of what this rank sends from now on: (bytes, form)."""
    sent: list[tuple[int, Form]] = []
    for way in comm._mailbox._ways:
        usual = way.send

        def send(
            peer: int, data: Any, tag: int, form: Form = Form.WHOLE, usual: Any = usual
        ) -> Request:
            sent.append((data.nbytes, form))
            found: Request = usual(peer, data, tag, form)
            return found

        monkeypatch.setattr(way, "send", send)
    return sent


def forms(sent: list[tuple[int, Form]]) -> dict[Form, int]:
    return {form: sum(f is form for _, f in sent) for form in Form}


def test_registered_memory_is_lent_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One word, whatever its length; no slot is filled."""

    def body(comm: Communicator) -> None:
        other = 1 - comm.rank
        x, y = np.zeros(40_000), np.zeros(9000)
        entry = comm.register(Array(x))
        sent = told(comm, monkeypatch)
        for turn in range(5):
            x[:] = values(40_000, comm.rank, salt=turn)
            first = 1000 * turn
            comm.Sendrecv(Array(x[first : first + 9000]), other, turn, Array(y), other, turn)
            assert (y == values(40_000, other, salt=turn)[first : first + 9000]).all()
        count = forms(sent)
        assert (count[Form.LENT], count[Form.TAKEN], count[Form.PIECE]) == (5, 5, 0)
        comm.Barrier()
        comm.unregister(entry)

    with_gpus([2], body, lent=True)


def test_other_memory_goes_through_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        other = 1 - comm.rank
        x, y = values(4000, comm.rank), np.zeros(4000)
        sent = told(comm, monkeypatch)
        comm.Sendrecv(Array(x), other, 1, Array(y), other, 1)
        assert (y == values(4000, other)).all()
        count = forms(sent)
        pieces = -(-32_000 // SLOT)
        assert (count[Form.LENT], count[Form.TAKEN], count[Form.PIECE]) == (pieces, pieces, 0)
        assert all(nbytes < 64 for nbytes, _ in sent), "no byte of it goes through the host"

    with_gpus([2], body, lent=True)


def test_messages_that_find_no_slot_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots are filled by messages that are received last."""

    def body(comm: Communicator) -> None:
        other, n = 1 - comm.rank, 3 * SLOTS
        sent = told(comm, monkeypatch)
        arrays = [np.zeros(700) for _ in range(n)]
        sends = [comm.Isend(Array(values(700, comm.rank, salt=i)), other, i) for i in range(n)]
        for i in reversed(range(n)):
            comm.Recv(Array(arrays[i]), other, i)
        Request.Waitall(sends)
        for i, array in enumerate(arrays):
            assert (array == values(700, other, salt=i)).all()
        count = forms(sent)
        assert count[Form.LENT], "some were lent"
        assert count[Form.PIECE], "others were not"
        assert len(comm._gpus.lender._free) == SLOTS  # type: ignore[union-attr]

    with_gpus([2], body, lent=True)


def test_three_ranks_lend_to_each_other() -> None:
    def body(comm: Communicator) -> None:
        x = [values(900, comm.rank, salt=p) for p in range(comm.size)]
        y = [np.zeros(900) for _ in range(comm.size)]
        others = [p for p in range(comm.size) if p != comm.rank]
        for _ in range(4):
            receives = [comm.Irecv(Array(y[p]) if p % 2 else y[p], p, 7) for p in others]
            sends = [comm.Isend(Array(x[p]), p, 7) for p in others]
            Request.Waitall(receives + sends)
            for p in others:
                assert (y[p] == values(900, p, salt=comm.rank)).all()
                y[p][:] = 0

    with_gpus([3], body, lent=True)


def test_memory_that_is_registered_no_more_is_named() -> None:
    registry = Registry()
    for address in (0x9000, 0x5000, 0x7000, 0x3000):
        entry = registry.add(address, Shared((0x1000, address), 64, object()))
    registry.remove(entry)
    slots = SimpleNamespace(index=1, address=0x9000)
    lender = Lender(SimpleNamespace(registry=registry), slots, {5: 0})
    assert lender.place_of_slot(0x9000 + 3 * SLOT) == (1, 3 * SLOT)
    assert lender.knows(4)
    assert not lender.knows(5), "its sender has registered it, this rank is about to"
    assert lender.find(5, 3, 16, 8) == 0x1010
    with raises(TransportError, "rank 5 sends 8 bytes of its registration 4, which is not registe"):
        lender.find(5, 4, 16, 8)


@given(st.integers(1, 1 << 34))
def test_pieces_fit_slots_and_all_slots_are_used(nbytes: int) -> None:
    piece = pieces_of(nbytes)
    assert 0 < piece <= lending.SLOT
    assert piece == lending.SLOT or piece * SLOTS >= nbytes or piece == lending._STEP


@given(st.sampled_from(list(Form)), st.integers(0, 999), st.integers(1000, 1 << 28))
def test_forms_have_places_of_their_own(form: Form, number: int, tags: int) -> None:
    tag = 0 if form is Form.HEAD else number
    value = formed(tag, form, tags, 1000)
    assert form_of(value, tags, 1000) == (tag, form)
    assert value <= tags + 3 * 1000
