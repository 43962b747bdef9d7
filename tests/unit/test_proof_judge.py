"""What follows from evidence: verdicts on made-up evidence, and that none is given too early."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.proof.evidence import (
    PATHS,
    UNPROVEN,
    Evidence,
    Lane,
    Moved,
    PairProof,
    PathReport,
    Registration,
    TableUse,
    Variant,
    WindowCheck,
)
from rdmakit.proof.judge import judge, kind_of
from rdmakit.proof.words import describe, fulfils, paths

SENT = 16 << 20
RC: Lane = ("rc_mlx5", "mlx5_0:1")
RXE: Lane = ("rc_verbs", "rxe0:1")
TCP: Lane = ("tcp", "eth0")
DIRECT = "rendezvous zero-copy read from remote"
STAGED = "rendezvous cuda_copy, fenced write to remote, frag host"


def port(side: str, name: str, state: str = "agrees", **more: Any) -> Moved:
    share = {"agrees": 1.01, "nothing": 0.0, "too few": 0.5, "too many": 3.0}.get(state, 0.0)
    kind = "rdma" if ":" in name else "net"
    fields: dict[str, Any] = {
        "rank": int(side == "receiver"), "side": side, "kind": kind, "port": name, "unit": "bytes",
        "source": "x", "during": int(SENT * share), "carried": int(SENT * share), "state": state,
    }  # fmt: skip
    return Moved(**{**fields, **more})


def ports(*names: str, state: str = "agrees", **more: Any) -> tuple[Moved, ...]:
    return tuple(
        port(side, name, state, **more) for side in ("sender", "receiver") for name in names
    )


def table(side: str, text: str, lane: Lane = RC, memory: str = "cuda") -> TableUse:
    return TableUse(
        operation="tagged message by ucp_tag_send*(multi)", memory=memory, text=text,
        lanes=((*lane, 100),), certain=False, side=side,
    )  # fmt: skip


def tables(text: str, lane: Lane = RC, memory: str = "cuda", **more: Any) -> Variant:
    uses = tuple(table(side, text, lane, memory) for side in ("sender", "receiver"))
    kind = "gpu" if memory == "cuda" else "host"
    return Variant(**{"name": "default", "memory": kind, "GBps": 1.0, "uses": uses, **more})


def registered(side: str, peermem: bool | None, dmabuf: bool | None) -> Registration:
    rank = int(side == "receiver")
    return Registration(rank=rank, side=side, device="mlx5_0", peermem=peermem, dmabuf=dmabuf)


def both(peermem: bool | None, dmabuf: bool | None) -> tuple[Registration, ...]:
    return tuple(registered(side, peermem, dmabuf) for side in ("sender", "receiver"))


def between(lane: Lane, memory: str = "host", **more: Any) -> Evidence:
    fields: dict[str, Any] = {
        "memory": memory, "nbytes": 4 << 20, "sent": SENT, "messages": 4, "channel": "ucx",
        "sender_lanes": (lane,), "receiver_lanes": (lane,), "counters": ports(lane[1]), "wrong": 0,
    }  # fmt: skip
    return Evidence(**{**fields, **more})


GDR = between(RC, "gpu", variants=(tables(DIRECT),), registrations=both(False, True))


def changed(evidence: Evidence, **more: Any) -> Evidence:
    return msgspec.structs.replace(evidence, **more)


def path(evidence: Evidence) -> str:
    return judge(evidence).path


@pytest.mark.parametrize(
    ("name", "kind"),
    [("rc_mlx5", "rdma"), ("dc_mlx5", "rdma"), ("ud_verbs", "rdma"), ("srd", "rdma"),
     ("gga_mlx5", "rdma"), ("tcp", "tcp"), ("posix", "memory"), ("cma", "memory"),
     ("cuda_ipc", "cuda"), ("gdr_copy", "cuda"), ("mpi", "")],
)  # fmt: skip
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_host_memory_between_nodes() -> None:
    assert path(between(TCP)) == "tcp"
    assert path(between(RC)) == "rdma-host"
    rxe = {"unit": "packets", "mtu": 1024, "during": 16500, "carried": 16500 * 1024}
    verdict = judge(between(RXE, counters=(*ports("rxe0:1", **rxe), *ports("eth0"))))
    assert verdict.path == "rdma-host"
    assert "16500 packets of up to 1024 bytes" in verdict.reasons[1]


def test_two_rails_carry_it_together() -> None:
    half = {"state": "too few", "during": SENT // 2 + 9000, "carried": SENT // 2 + 9000}
    lanes = (RC, ("rc_mlx5", "mlx5_1:1"))
    found = between(
        RC, sender_lanes=lanes, receiver_lanes=lanes, counters=ports("mlx5_0:1", "mlx5_1:1", **half)
    )
    assert path(found) == "rdma-host"
    assert path(changed(found, counters=ports("mlx5_0:1", **half))) == UNPROVEN


@pytest.mark.parametrize("state", ["nothing", "too few", "too many", "busy", "unknown"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("lane", [TCP, RC], ids=str)
def test_counters_of_both_ends_must_agree(lane: Lane, side: str, state: str) -> None:
    counters = tuple(
        port(s, lane[1], state if s == side else "agrees") for s in ("sender", "receiver")
    )
    verdict = judge(between(lane, counters=counters))
    assert verdict.path == UNPROVEN
    assert any(text.startswith(f"(b) {side}") for text in verdict.missing)


def test_bytes_that_went_elsewhere() -> None:
    away = (*ports("mlx5_0:1", state="nothing"), *ports("eth0"))
    verdict = judge(between(RC, counters=away))
    assert verdict.path == UNPROVEN
    assert "UCX says rdma on mlx5_0:1, but at the sender eth0 sent" in verdict.disagreements[0]
    verdict = judge(between(TCP, counters=(*ports("eth0", state="nothing"), *ports("mlx5_0:1"))))
    assert verdict.path == UNPROVEN
    assert "UCX says tcp on eth0, but at the sender mlx5_0:1 sent" in verdict.disagreements[0]


def test_one_host() -> None:
    turned = (*ports("eth0", state="nothing"), *ports("lo"))
    verdict = judge(between(TCP, counters=turned, one_stack=True, virtual=True))
    assert (verdict.path, verdict.disagreements) == (UNPROVEN, ())
    assert "virtual nodes of one host: bytes need not leave it" in verdict.missing
    lo = between(("tcp", "lo"), one_stack=True)
    assert "(b) loopback" in " ".join(judge(lo).missing)
    assert path(changed(lo, one_stack=False)) == UNPROVEN
    # Two cards of one host with a cable between them do count; one card may turn them round.
    assert path(between(RXE, one_stack=True)) == UNPROVEN
    cable = between(
        RC, one_stack=True, sender_lanes=(RC,), receiver_lanes=(("rc_mlx5", "mlx5_1:1"),),
        counters=(port("sender", "mlx5_0:1"), port("receiver", "mlx5_1:1")),
    )  # fmt: skip
    assert path(cable) == "rdma-host"


def test_what_ucx_does_not_tell() -> None:
    assert path(between(TCP, sender_lanes=())) == UNPROVEN
    assert path(between(("mpi", "openmpi"), channel="mpi")) == UNPROVEN
    assert path(between(TCP, sender_lanes=(("cma", "memory"),))) == UNPROVEN
    mixed = between(RC, sender_lanes=(RC, TCP), receiver_lanes=(RC, TCP))
    assert path(mixed) == UNPROVEN  # of two kinds: which one carries this size?
    told = (tables(DIRECT, memory="host"),)
    assert path(changed(mixed, variants=told)) == "rdma-host"
    another = (tables(DIRECT, memory="host", same_library=False),)
    assert path(changed(mixed, variants=another)) == UNPROVEN
    verdict = judge(between(TCP, variants=told))
    assert "UCX's table says rdma" in verdict.disagreements[0]


def test_wrong_or_unfinished() -> None:
    assert path(between(TCP, wrong=7)) == UNPROVEN
    assert path(between(TCP, wrong=None)) == UNPROVEN
    verdict = judge(between(TCP, problems=("rank 1: TransferTimeout: no word",)))
    assert verdict.missing == ("rank 1: TransferTimeout: no word",)


# -- GPU memory -------------------------------------------------------------------------------


def test_gpu_direct() -> None:
    assert path(GDR) == "gdr-dmabuf"
    assert path(changed(GDR, registrations=both(True, True))) == "gdr-dmabuf"
    assert path(changed(GDR, registrations=both(True, False))) == "gdr-peermem"
    off = (tables(DIRECT, dmabuf="n"),)
    assert path(changed(GDR, variants=off, registrations=both(True, True))) == "gdr-peermem"
    assert path(changed(GDR, variants=off)) == UNPROVEN
    odd = (registered("sender", True, True), registered("receiver", False, True))
    assert path(changed(GDR, registrations=odd)) == "gdr-dmabuf"
    odd = (registered("sender", True, False), registered("receiver", False, True))
    assert path(changed(GDR, registrations=odd)) == UNPROVEN


def test_registration_contradicts_the_table() -> None:
    verdict = judge(changed(GDR, registrations=both(False, False)))
    assert verdict.path == UNPROVEN
    assert "UCX's table says zero-copy, but (d) sender" in verdict.disagreements[0]
    verdict = judge(changed(GDR, registrations=both(None, None)))
    assert (verdict.path, verdict.disagreements) == (UNPROVEN, ())


def test_gpu_memory_through_the_host() -> None:
    staged = changed(GDR, variants=(tables(STAGED),))
    assert (path(staged), judge(staged).carrier) == ("host-staged", "rdma")
    one = (table("sender", DIRECT), table("receiver", STAGED))
    assert path(changed(GDR, variants=(tables(DIRECT, uses=one),))) == "host-staged"
    tcp = between(TCP, "gpu")
    assert (path(tcp), judge(tcp).carrier) == ("host-staged", "tcp")
    ours = between(RC, "gpu", staged="gpu_direct=off")
    assert (path(ours), judge(ours).carrier) == ("host-staged", "rdma")
    assert path(changed(ours, counters=())) == UNPROVEN


def test_rates_prove_nothing() -> None:
    fast = (tables(DIRECT, uses=(), GBps=400.0), tables(STAGED, name="gdr-off", GBps=1.0, uses=()))
    assert path(changed(GDR, variants=fast)) == UNPROVEN


def test_a_switch_without_effect_is_told() -> None:
    verdict = judge(changed(GDR, variants=(tables(DIRECT), tables(DIRECT, name="gdr-off"))))
    assert verdict.path == "gdr-dmabuf"
    assert any("changed nothing" in text for text in verdict.reasons)


PARTS: dict[str, Any] = {
    "sender_lanes": (),
    "receiver_lanes": (),
    "counters": (),
    "variants": (),
    "registrations": (),
    "wrong": None,
}
HALVES: dict[str, Any] = {
    "sender counters": {"counters": ports("mlx5_0:1")[1:]},
    "receiver counters": {"counters": ports("mlx5_0:1")[:1]},
    "sender registration": {"registrations": both(True, True)[1:]},
    "receiver registration": {"registrations": both(True, True)[:1]},
    "sender table": {"variants": (tables(DIRECT, uses=(table("receiver", DIRECT),)),)},
    "receiver table": {"variants": (tables(DIRECT, uses=(table("sender", DIRECT),)),)},
    "host table": {"variants": (tables(DIRECT, memory="host"),)},
    "failed child": {"variants": (tables(DIRECT, problem="ended"),)},
    "another UCX": {"variants": (tables(DIRECT, same_library=False),)},
}


def test_no_missing_evidence_yields_gpu_direct() -> None:
    for count in range(1, len(PARTS) + 1):
        for names in itertools.combinations(PARTS, count):
            lacking = changed(GDR, **{name: PARTS[name] for name in names})
            assert not path(lacking).startswith("gdr"), names
    for name, change in HALVES.items():
        assert not path(changed(GDR, **change)).startswith("gdr"), name


STATES = st.sampled_from(["agrees", "nothing", "too few", "too many", "busy", "unknown"])
LANES = st.lists(
    st.sampled_from([RC, TCP, RXE, ("cma", "memory"), ("cuda_copy", "cuda"), ("tcp", "lo")]),
    max_size=2,
).map(tuple)
MAYBE = st.sampled_from([True, False, None])
TEXTS = st.sampled_from([DIRECT, STAGED, "eager short", "eager zero-copy copy-out"])


@st.composite
def evidence(draw: Any) -> Evidence:
    counters = tuple(
        port(side, name, draw(STATES))
        for side in ("sender", "receiver")
        for name in ("mlx5_0:1", "rxe0:1", "eth0", "lo")
        if draw(st.booleans())
    )
    uses = tuple(
        table(side, draw(TEXTS), draw(st.sampled_from([RC, TCP])),
              draw(st.sampled_from(["cuda", "host"])))
        for side in ("sender", "receiver") if draw(st.booleans())
    )  # fmt: skip
    registrations = tuple(
        registered(side, draw(MAYBE), draw(MAYBE))
        for side in ("sender", "receiver")
        if draw(st.booleans())
    )
    window = draw(st.sampled_from(["shm", "cuda-ipc", "host-staged", "memory", ""]))
    return Evidence(
        memory=draw(st.sampled_from(["host", "gpu"])),
        nbytes=4 << 20,
        sent=draw(st.sampled_from([0, SENT])),
        messages=4,
        inside=draw(st.booleans()),
        one_stack=draw(st.booleans()),
        virtual=draw(st.booleans()),
        channel=draw(st.sampled_from(["ucx", "mpi", ""])),
        staged=draw(st.sampled_from(["", "gpu_direct=off"])),
        sender_lanes=draw(LANES),
        receiver_lanes=draw(LANES),
        counters=counters,
        variants=(tables(DIRECT, uses=uses, dmabuf=draw(st.sampled_from(["", "n"]))),),
        registrations=registrations,
        window=WindowCheck(kind=window, same=draw(st.booleans())) if window else None,
        wrong=draw(st.sampled_from([0, 0, None, 3])),
        problems=draw(st.sampled_from([(), (), ("rank 0: lost",)])),
    )


@given(evidence())
def test_what_every_verdict_rests_on(found: Evidence) -> None:
    verdict = judge(found)
    assert verdict.path in (*PATHS, UNPROVEN)
    assert (
        (verdict.missing or verdict.disagreements)
        if verdict.path == UNPROVEN
        else (verdict.reasons and not verdict.missing)
    )
    assert judge(msgspec.json.decode(msgspec.json.encode(found), type=Evidence)) == verdict
    if verdict.path == UNPROVEN:
        return
    assert not verdict.disagreements
    assert not found.problems
    assert found.wrong == 0
    if verdict.path in ("shm", "cuda-ipc", "cuda-copy") or found.inside:
        assert found.inside
        assert found.window is not None
        assert found.window.same
        assert all(m.state == "nothing" for m in found.counters if m.port != "lo")
        return
    kind = "net" if "tcp" in (verdict.path, verdict.carrier) else "rdma"
    for side in ("sender", "receiver"):
        agree = [m for m in found.counters if m.side == side and m.kind == kind]
        assert any(m.state == "agrees" and m.port != "lo" for m in agree)
    assert found.sender_lanes
    assert found.receiver_lanes
    if verdict.path.startswith("gdr"):
        assert found.memory == "gpu"
        assert not found.staged
        (variant,) = found.variants
        assert {(u.side, u.text, u.memory) for u in variant.uses} == {
            ("sender", DIRECT, "cuda"), ("receiver", DIRECT, "cuda"),
        }  # fmt: skip
        assert {r.side for r in found.registrations} == {"sender", "receiver"}
        name = "dmabuf" if verdict.path == "gdr-dmabuf" else "peermem"
        assert all(getattr(r, name) for r in found.registrations)


# -- inside a node, and in words --------------------------------------------------------------


def test_inside_a_node() -> None:
    shm = Evidence(
        memory="host", nbytes=8, sent=SENT, inside=True, wrong=0,
        window=WindowCheck(kind="shm", same=True), counters=ports("eth0", state="nothing"),
    )  # fmt: skip
    assert path(shm) == "shm"
    assert path(changed(shm, memory="gpu")) == UNPROVEN
    ipc = WindowCheck(kind="cuda-ipc", same=True)
    assert path(changed(shm, memory="gpu", window=ipc)) == "cuda-ipc"
    assert path(changed(shm, window=WindowCheck(kind="shm", same=False))) == UNPROVEN
    assert path(changed(shm, window=None)) == UNPROVEN
    assert path(changed(shm, counters=())) == UNPROVEN
    verdict = judge(changed(shm, counters=ports("eth0")))
    assert "the window should carry the bytes" in verdict.disagreements[0]
    assert path(changed(shm, counters=(*shm.counters, *ports("lo")))) == "shm"


def report(*found: Evidence, memory: str = "host") -> PathReport:
    pairs = tuple(
        PairProof(first=0, second=i + 1, hosts=("a", f"b{i}"), verdict=judge(e), evidence=e)
        for i, e in enumerate(found)
    )
    return PathReport(memory=memory, nbytes=4 << 20, pairs=pairs)


def test_demands() -> None:
    assert fulfils(report(between(RC)), "rdma") == ""
    assert "gdr is required" in fulfils(report(between(RC)), "gdr")
    assert fulfils(report(GDR, memory="gpu"), "gdr") == ""
    assert fulfils(report(GDR, memory="gpu"), "rdma") == ""
    staged = report(GDR, changed(GDR, variants=(tables(STAGED),)), memory="gpu")
    assert fulfils(staged, "rdma") == ""
    text = fulfils(staged, "gdr")
    assert text == "gdr is required, but ranks 0 -> 2 (a -> b1) are host-staged over rdma"
    assert "one node" in fulfils(report(), "rdma")
    assert fulfils(report(between(RC), between(TCP)), "rdma").endswith("are tcp")
    assert paths(report(between(RC), between(TCP))) == "rdma-host+tcp"


def test_words() -> None:
    lines = describe(
        report(between(RC), between(RC), between(TCP, counters=ports("eth0", state="nothing")))
    )
    assert lines[0] == "path of 4M messages of host memory"
    assert lines[1] == "  rdma-host: ranks 0 -> 1 (a -> b0), 0 -> 2 (a -> b1)"
    assert any(line.startswith("    missing: (b) sender: eth0 sent 0 bytes") for line in lines)
    assert any(line.startswith("    (a) UCX's lanes: tcp/eth0") for line in lines)
