"""The arithmetic of ports' counters against what was sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.proof.counters import PortReading, difference, moved, state_of
from rdmakit.proof.evidence import Moved

MIB = 1 << 20
MAX32 = (1 << 32) - 1


def reading(sent: int | None, received: int | None = 0, **more: object) -> PortReading:
    fields: dict[str, object] = {"port": "p0", "kind": "net", "unit": "bytes", "source": "here"}
    return PortReading(**{**fields, **more}, sent=sent, received=received)  # type: ignore[arg-type]


def one(
    values: list[int | None],
    sent: int = 16 * MIB,
    seconds: float = 0.5,
    pause: float = 0.5,
    messages: int = 4,
    **more: object,
) -> Moved:
    looks = [{"p0": reading(value, **more)} for value in values]
    (found,) = moved(looks, seconds, pause, sent, messages, 3, "sender")
    return found


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        (5, 12, 7),
        (7, 7, 0),
        (MAX32 - 9, 20, 30),  # 32 bits come round
        (MAX32, MAX32, None),  # InfiniBand's stay at their end
        (1 << 40, 5, None),  # reset
        (None, 5, None),
        (5, None, None),
    ],
)
def test_difference(before: int | None, after: int | None, want: int | None) -> None:
    assert difference(before, after) == want


@given(st.integers(0, MAX32), st.integers(0, MAX32 - 1))
def test_a_wrap_is_put_right(start: int, step: int) -> None:
    after = (start + step) & MAX32
    if not start == after == MAX32:
        assert difference(start, after) == step


def test_agrees_less_the_pause() -> None:
    # 17 MiB while 16 went, of which half a MiB passes in a pause of half the length.
    found = one([0, 17 * MIB, 17 * MIB, 17 * MIB + MIB // 4], seconds=0.5, pause=0.25)
    assert (found.state, found.carried, found.idle) == ("agrees", 16 * MIB + MIB // 2, MIB // 2)
    assert found.others
    assert "3 %" in found.note
    assert (found.rank, found.side) == (3, "sender")


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ([0, 16 * MIB, 0, 0], "agrees"),
        ([0, 16 * MIB + MIB // 2, 0, 0], "agrees"),
        ([9, 9, 9, 9], "nothing"),
        ([0, 8 * MIB, 0, 0], "too few"),
        ([0, 40 * MIB, 0, 0], "too many"),
        ([0, 22 * MIB, 22 * MIB, 28 * MIB], "busy"),
        ([0, None, 0, 0], "unknown"),
        ([0, 16 * MIB, None, 0], "unknown"),
        ([MAX32 - MIB, 15 * MIB - 1, 15 * MIB, 15 * MIB], "agrees"),
        ([MAX32, MAX32, MAX32, MAX32], "unknown"),
        ([5 << 40, 16 * MIB, 0, 0], "unknown"),
    ],
)
def test_state(values: list[int | None], state: str) -> None:
    assert one(values).state == state


def test_a_port_that_comes_or_goes_is_unknown() -> None:
    look = {"p0": reading(0)}
    (found,) = moved([look, {}, look, look], 0.5, 0.5, MIB, 1, 0, "sender")
    assert found.state == "unknown"
    assert moved([{}, {}, {}, {}], 0.5, 0.5, MIB, 1, 0, "sender") == ()


def test_the_receiver_looks_at_what_came() -> None:
    looks = [{"p0": reading(0, n)} for n in (0, 16 * MIB, 16 * MIB, 16 * MIB)]
    (found,) = moved(looks, 0.5, 0.5, 16 * MIB, 4, 1, "receiver")
    assert (found.state, found.carried) == ("agrees", 16 * MIB)
    (found,) = moved(looks, 0.5, 0.5, 16 * MIB, 4, 1, "sender")
    assert found.state == "nothing"


def test_packets_of_a_software_port() -> None:
    # 4103 packets of up to 1024 bytes were seen for 4 MiB over rdma_rxe.
    rxe = {"kind": "rdma", "unit": "packets", "mtu": 1024}
    found = one([100, 4203, 4203, 4203], sent=4 * MIB, messages=1, **rxe)
    assert (found.state, found.carried) == ("agrees", 4103 * 1024)
    assert one([0, 2000, 2000, 2000], sent=4 * MIB, messages=1, **rxe).state == "too few"
    assert one([0, 41, 41, 41], sent=4 * MIB, messages=1, **rxe).state == "nothing"
    assert one([0, 20_000, 20_000, 20_000], sent=4 * MIB, messages=1, **rxe).state == "too many"
    assert one([0, 4103, 4103, 4103], sent=4 * MIB, **{**rxe, "mtu": 0}).state == "unknown"


def test_control_messages_of_small_messages() -> None:
    # A message of 4 KiB may bring half a KiB of its own.
    sent = 1000 * 4096
    assert state_of(int(sent * 1.5), sent, "bytes", 0, 1000) == "agrees"
    assert state_of(int(sent * 1.5), sent, "bytes", 0, 1) == "too many"


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 1 << 48)), min_size=4, max_size=4),
    st.integers(1, 1 << 40),
    st.floats(1e-6, 10),
    st.floats(1e-6, 10),
)
def test_agreement_means_enough_bytes(
    values: list[int | None], sent: int, seconds: float, pause: float
) -> None:
    found = one(values, sent=sent, seconds=seconds, pause=pause)
    if None in values:
        assert found.state == "unknown"
    if found.state == "agrees":
        assert 0.95 * sent <= found.carried <= 1.4 * sent + 4 * 512
        assert found.idle <= 0.25 * sent
