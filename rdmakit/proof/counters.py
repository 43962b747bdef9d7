"""What ports counted, held against what was sent; pure arithmetic.

A port agrees when it counted, beyond what it counts in a pause of the same length, the bytes of
the messages: at least nearly all of them, and not much more than headers, acknowledgements and
control messages add. Packets are taken as full: then bytes are at most packets times MTU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rdmakit.proof.evidence import Moved

__all__ = ["PortReading", "difference", "moved", "state_of"]

LEAST = 0.95
"""Share of the sent bytes that must be seen: nothing may be compressed or merged away."""
MOST = {"bytes": 1.4, "packets": 3.0}
"""Times the sent bytes that may be seen. Of small packets, and acknowledgements between, the
count times MTU is more; TCP at MTU 1500 adds 5 % and acknowledgements go the other way."""
EACH = {"bytes": 512, "packets": 4}
"""What may be seen beyond that for each message: its control messages and their headers."""
_NOTHING = 0.05
_BUSY = 0.25
"""Share of the sent bytes that a pause may show before nothing can be concluded."""
_OTHERS = 0.02
_WRAP = 1 << 32
_STUCK = _WRAP - 1


class PortReading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one port."""

    port: str
    kind: str
    """``rdma`` or ``net``."""
    unit: str
    """``bytes`` or ``packets``."""
    sent: int | None
    """In units; None where it cannot be read."""
    received: int | None
    source: str
    mtu: int = 0
    """Most bytes of payload in a packet, where the unit is packets."""


def difference(before: int | None, after: int | None) -> int | None:
    """Return what was counted between two looks; None where the counter does not tell.

    A counter of 32 bits that came round is put right. One that stands at its end is stuck there
    (InfiniBand's counters of 32 bits stay at their maximum); a larger one that went down was reset.
    """
    if before is None or after is None or before < 0 or after < 0:
        return None
    if before == after == _STUCK:
        return None
    if after >= before:
        return after - before
    return after + _WRAP - before if before < _WRAP else None


def moved(
    looks: Sequence[Mapping[str, PortReading]],
    seconds: float,
    pause: float,
    expected: int,
    messages: int,
    rank: int,
    side: str,
) -> tuple[Moved, ...]:
    """Return what each port of one host counted for the messages.

    Args:
        looks: before and after the messages, before and after the pause.
        seconds: between the first two.
        pause: between the last two; scaled where it is not as long.
        expected: bytes of the messages.
        messages: how many.
        rank: who looked.
        side: ``sender`` or ``receiver``.
    """
    found = []
    for port in sorted(set().union(*looks)):
        present = [look.get(port) for look in looks]
        first = next(reading for reading in present if reading is not None)
        values = [
            None if r is None else (r.sent if side == "sender" else r.received) for r in present
        ]
        during, idle = difference(values[0], values[1]), difference(values[2], values[3])
        found.append(
            _moved(
                first,
                during,
                idle,
                seconds / pause if pause > 0 else 0.0,
                expected,
                messages,
                rank,
                side,
            )
        )
    return tuple(found)


def _moved(
    port: PortReading,
    during: int | None,
    idle: int | None,
    scale: float,
    expected: int,
    messages: int,
    rank: int,
    side: str,
) -> Moved:
    state, note, carried, resting, others = "unknown", "", 0, 0, False
    if during is None or idle is None:
        note = "the counter is missing, stuck at its end, or was reset"
    elif port.unit == "packets" and port.mtu <= 0:
        note = "packets of unknown size: the port's MTU cannot be told"
    elif scale <= 0 or expected <= 0:
        note = "nothing to compare with"
    else:
        each = port.mtu if port.unit == "packets" else 1
        resting = round(idle * scale)
        carried = (during - resting) * each
        others = resting * each > _OTHERS * expected
        state = state_of(carried, expected, port.unit, resting * each, messages, each)
        if others:
            share = 100 * resting * each / expected
            note = f"others' traffic: {share:.0f} % of the messages' bytes pass in a pause too"
    return Moved(
        rank=rank,
        side=side,
        kind=port.kind,
        port=port.port,
        unit=port.unit,
        source=port.source,
        during=during or 0,
        idle=resting,
        mtu=port.mtu,
        carried=carried,
        state=state,
        others=others,
        note=note,
    )


def state_of(
    carried: int, expected: int, unit: str, resting: int = 0, messages: int = 0, mtu: int = 1
) -> str:
    """Return what ``carried`` bytes mean where ``expected`` were sent in ``messages``."""
    if expected <= 0:
        return "unknown"
    if resting > _BUSY * expected:
        return "busy"
    if carried < _NOTHING * expected:
        return "nothing"
    if carried < LEAST * expected:
        return "too few"
    most = MOST[unit] * expected + messages * EACH[unit] * max(mtu, 1)
    return "agrees" if carried <= most else "too many"
