"""What is compared between nodes, whether they reach each other, and the star they talk over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.doctor.compare import JOB_CHECKS, compare_nodes
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.node_facts import NodeFacts, node_facts
from rdmakit.doctor.reach import Endpoint, endpoints_of, measure_clocks, port_range, reach
from rdmakit.doctor.reach_findings import Outcome, Place, reach_findings
from rdmakit.doctor.star import StarBootstrap
from rdmakit.drivers.host import CommandResult
from rdmakit.errors import TransferTimeout
from rdmakit.memory import MemoryBootstrap, run_threads
from rdmakit.topology.model import Gid, Machine, Nic, Port
from tests.unit.doctor_parts import MPI, Children, context, gpu_machine, interface, rank, write

FAIL, WARN, OK = Status.FAIL, Status.WARN, Status.OK


def node(place: int, **changes: object) -> NodeFacts:
    values: dict[str, object] = {
        "host": f"node{place}",
        "boot_id": f"boot{place}",
        "addresses": {"eth0": f"192.0.2.{place + 1}", "docker0": "172.17.0.1"},
        "prefixes": {"eth0": 24},
        "mtus": {"eth0": 1500, "docker0": 1500},
        "tcp": ("eth0",),
        "clock": 0.001 * place,
        "versions": {"UCX": "1.20.1", "Python": "3.12.1"},
        "settings": {"UCX_TLS": "all"},
        "machine": Machine(f"node{place}"),
        **changes,
    }
    return NodeFacts(**values)  # type: ignore[arg-type]


def bad(nodes: Sequence[NodeFacts]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    told = compare_nodes(nodes)
    assert {finding.check for finding in told} == {check.id for check in JOB_CHECKS}
    for finding in told:
        if finding.status in (FAIL, WARN):
            assert finding.cure, finding
            found.setdefault(finding.check, []).append(finding)
    return found


def test_equal_nodes() -> None:
    assert bad([node(place) for place in range(4)]) == {}
    assert {finding.status for finding in compare_nodes([node(0)])} == {Status.SKIPPED}


def test_two_hosts_of_one_name() -> None:
    found = bad([node(0), node(1), node(2, host="node1")])
    (finding,) = found["job.hosts"]
    assert finding.status is FAIL
    assert "node1 (192.0.2.2), node1 (192.0.2.3)" in finding.found
    # Parts of one host are no two hosts.
    assert bad([node(0), node(1, host="node0", boot_id="boot0")]).keys() == set()


def test_one_address() -> None:
    nodes = [node(place, tcp=("docker0", "eth0")) for place in range(3)]
    (finding,) = bad(nodes)["job.addresses"]
    assert finding.status is FAIL
    assert "172.17.0.1 (docker0) is the address of node0, node1, node2" in finding.found
    assert "UCX_NET_DEVICES=eth0" in finding.cure
    nodes = [node(place, tcp=("eth0", "docker0")) for place in range(3)]
    assert bad(nodes)["job.addresses"][0].status is WARN


def test_mtu() -> None:
    (finding,) = bad([node(0), node(1, mtus={"eth0": 9000}), node(2)])["job.mtu"]
    assert "1500 on node0, node2; 9000 on node1" in finding.found
    assert "ip link set eth0 mtu 9000 on node0, node2" in finding.cure


def roce(index: int, mtu: int = 4200) -> Machine:
    gids = (Gid(index, "::ffff:10.0.0.1", "RoCE v2"),)
    port = Port(1, "ACTIVE", "LinkUp", 100.0, "Ethernet", netdev_mtu=mtu, gids=gids)
    return Machine("node", nics=(Nic("mlx5_0", "mlx5_0", ports=(port,)),))


def test_gid_index() -> None:
    nodes = [node(0, machine=roce(3)), node(1, machine=roce(5))]
    assert bad(nodes) == {}  # UCX looks for the entry itself
    settings = {"UCX_IB_GID_INDEX": "3"}
    nodes = [msgspec.structs.replace(own, settings=settings) for own in nodes]
    (finding,) = bad(nodes)["job.gid"]
    assert finding.status is FAIL
    assert finding.cure == "unset UCX_IB_GID_INDEX"


def test_roce_mtu() -> None:
    found = bad([node(0, machine=roce(3)), node(1, machine=roce(3, 1500))])
    assert set(found) == {"job.mtu"}
    assert "mlx5_0:1 net device MTU" in found["job.mtu"][0].found


def test_configuration() -> None:
    nodes = [node(place, machine=gpu_machine()) for place in range(3)]
    assert bad(nodes) == {}
    nodes[1] = node(1, machine=gpu_machine(nics=1))
    (first, *_) = bad(nodes)["job.configuration"]
    assert "node1: mlx5_0" in first.found


@pytest.mark.parametrize(("name", "status"), [("UCX", FAIL), ("Python", WARN), ("numpy", WARN)])
def test_versions(name: str, status: Status) -> None:
    nodes = [node(place, versions={name: "2.0"}) for place in range(3)]
    nodes[2] = node(2, versions={name: "1.0"})
    (finding,) = bad(nodes)["job.versions"]
    assert finding.status is status
    assert finding.found == f"{name} is 2.0, but 1.0 on node2"


def test_versions_that_could_not_be_found_out() -> None:
    """What a node does not know of itself is no difference."""
    nodes = [node(place, versions={"MPI": "5", "numpy": "2"}) for place in range(3)]
    nodes[1] = node(1, versions={"numpy": "2"}, untold=("MPI",))
    nodes[2] = node(2, versions={"MPI": "5"}, untold=("Python",))
    assert bad(nodes) == {}
    unknown = [one for one in compare_nodes(nodes) if one.status is Status.UNKNOWN]
    assert [(one.check, one.subject) for one in unknown] == [
        ("job.versions", "MPI"),
        ("job.versions", "Python"),
    ]
    assert unknown[0].found == "the release of MPI could not be found out on node1"
    nodes[2] = node(2, versions={"MPI": "4"}, untold=("Python",))
    assert bad(nodes)["job.versions"][0].found == "MPI is 5, but 4 on node2"


def test_settings() -> None:
    nodes = [node(place) for place in range(3)]
    nodes[1] = node(1, settings={})
    nodes[2] = node(2, apart={"NCCL_DEBUG": {"5": "INFO"}})
    found = bad(nodes)["job.settings"]
    assert [finding.subject for finding in found] == ["UCX_TLS", "NCCL_DEBUG"]
    assert "mpirun -x UCX_TLS" in found[0].cure
    assert "rank 5 has INFO" in found[1].found


@settings(deadline=None)
@given(st.lists(st.floats(-0.4, 0.4), min_size=3, max_size=9), st.floats(2.0, 1e6))
def test_clocks(offsets: list[float], wrong: float) -> None:
    nodes = [node(place, clock=offset) for place, offset in enumerate(offsets)]
    assert bad(nodes) == {}
    nodes[-1] = node(len(offsets) - 1, clock=wrong)
    (finding,) = bad(nodes)["job.clock"]
    assert finding.subject == f"node{len(offsets) - 1}"


def test_facts_of_a_node(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", mtu=9000, default=True)
    write(tmp_path, "/proc/sys/kernel/hostname", "alpha\n")
    write(tmp_path, "/proc/sys/kernel/random/boot_id", "abc\n")
    environ = {"UCX_TLS": "all", "OMPI_COMM_WORLD_RANK": "0", "UCX_NET_DEVICES": "eth0"}
    environ["LD_LIBRARY_PATH"] = "/a:/b"
    other = {
        **environ,
        "LD_LIBRARY_PATH": "/a:/a:/b",
        "UCX_TLS": "tcp",
        "OMPI_COMM_WORLD_RANK": "1",
        "UCX_NET_DEVICES": "eth1",
    }
    ranks = (rank(0, environ=environ), rank(1, environ=other))
    facts = node_facts(context(tmp_path, environ=environ, ranks=ranks, job_size=2))
    assert facts.host == "alpha"
    assert facts.boot_id == "abc"
    assert endpoints_of(facts) == [Endpoint("eth0", "192.0.2.7", 24, 9000)]
    assert facts.settings == {"UCX_TLS": "all", "LD_LIBRARY_PATH": "/a:/b"}
    assert facts.apart == {"UCX_TLS": {"1": "tcp"}}
    assert facts.versions["UCX"] == "1.20.1"
    assert facts.versions["MPI"] == "Open MPI v5.0.11"
    assert facts.untold == ()
    text = msgspec.json.encode(facts)
    assert msgspec.json.decode(text, type=NodeFacts) == facts


def test_facts_of_a_node_whose_processes_are_slow(tmp_path: Path) -> None:
    def late(argv: object, timeout: float) -> CommandResult:
        return CommandResult((), None, "", "", "python: no end after 30 s, killed")

    assert node_facts(context(tmp_path, children=late)).untold == ("UCX", "MPI", "Python")
    half = Children(mpi=msgspec.structs.replace(MPI, library=""))
    facts = node_facts(context(tmp_path, children=half))
    assert facts.untold == ("MPI",)
    assert "MPI" not in facts.versions


# -- reach --------------------------------------------------------------------------------------


def between(size: int, endpoints: Any, seconds: float = 5.0) -> list[Finding]:
    """Return what threads that are nodes on 127.0.0.x find; all must find the same."""

    def main(boot: MemoryBootstrap) -> list[Finding]:
        return reach(boot, f"node{boot.rank}", endpoints(boot.rank), seconds=seconds)

    told = run_threads(size, main)
    assert all(found == told[0] for found in told)
    return told[0]


def loopback(place: int) -> list[Endpoint]:
    return [Endpoint("lo", f"127.0.0.{place + 1}", 8, 65536)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reach_each_other(size: int) -> None:
    (finding,) = between(size, loopback)
    assert finding.status is (OK if size > 1 else Status.SKIPPED)
    if size > 1:
        assert f"{size * (size - 1)} connections" in finding.found


def test_an_address_that_two_hosts_have() -> None:
    (finding,) = between(3, lambda place: loopback(max(0, place - 1)))
    assert "node0 (lo 127.0.0.1) does not reach node1" in finding.found
    assert "the same address" in finding.found
    assert "UCX_NET_DEVICES" in finding.cure


def test_an_address_of_no_host() -> None:
    """192.0.2.x is for documentation: nobody has it, so nobody can listen on it."""
    nowhere = [Endpoint("eth9", "192.0.2.99", 24, 1500)]
    found = between(3, lambda place: nowhere if place == 2 else loopback(place), 1.0)
    assert any("none of 2 nodes reaches node2 at 192.0.2.99" in f.found for f in found)
    assert all("node2" in f.found for f in found)


def test_ports() -> None:
    assert list(port_range({"UCX_TCP_PORT_RANGE": "41000-41002"})) == [41000, 41001, 41002]
    for text in ("", "0", "5-3", "x"):
        assert list(port_range({"UCX_TCP_PORT_RANGE": text})) == [0]

    def main(boot: MemoryBootstrap) -> list[Finding]:
        ports = range(42117, 42190)
        return reach(boot, f"node{boot.rank}", loopback(boot.rank), ports=ports)

    assert run_threads(3, main)[0][0].status is OK


def test_nodes_without_an_address() -> None:
    assert between(2, lambda _: [])[0].status is Status.SKIPPED


def outcome(source: int, peer: int, kind: str = "ok", **more: object) -> Outcome:
    values: dict[str, object] = {"mtu": 9000, "to_mtu": 9000, **more}
    return Outcome(
        source, peer, "eth0", f"10.0.0.{source}", "eth0", f"10.0.0.{peer}", kind, **values
    )  # type: ignore[arg-type]


def findings(size: int, kinds: dict[tuple[int, int], Outcome]) -> list[Finding]:
    places = [Place(f"node{place}") for place in range(size)]
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    return reach_findings(places, [kinds.get(pair, outcome(*pair)) for pair in pairs], 3.0)


@pytest.mark.parametrize(
    ("kind", "words", "cure"),
    [
        ("silent", "no answer within 3 s: a firewall drops", "iptables -I INPUT"),
        ("refused", "a firewall rejects it", "iptables -I INPUT"),
        ("unreachable", "no route", "ip route get 10.0.0.2"),
        ("large-out", "small packets pass", "mtu 1500 on all hosts"),
        ("large-back", "do not come back", "mtu 1500 on all hosts"),
        ("stranger", "several hosts have it", "UCX_NET_DEVICES"),
        ("mute", "connected, but no answer", "iptables -I INPUT"),
        ("broken", "the connection broke", "iptables -I INPUT"),
    ],
)
def test_one_pair(kind: str, words: str, cure: str) -> None:
    (finding,) = findings(4, {(1, 2): outcome(1, 2, kind)})
    assert finding.status is FAIL
    assert finding.found.startswith("node1 (eth0 10.0.0.1) does not reach node2 (eth0 10.0.0.2):")
    assert words in finding.found
    assert cure in finding.cure
    both = findings(4, {(1, 2): outcome(1, 2, kind), (2, 1): outcome(2, 1, kind)})
    assert len(both) == 1
    assert "nor the other way round" in both[0].found


def test_mtu_that_differs() -> None:
    (finding,) = findings(2, {(0, 1): outcome(0, 1, "large-out", to_mtu=1500)})
    assert "(MTU 9000 and 1500)" in finding.found
    assert finding.cure.startswith("on node0: ip link set eth0 mtu 1500")


def test_a_node_that_nobody_reaches() -> None:
    silent = {(other, 3): outcome(other, 3, "silent") for other in range(3)}
    (finding,) = findings(4, silent)
    assert finding.found.startswith("none of 3 nodes reaches node3")


def test_many_pairs_are_not_all_told() -> None:
    size = 12
    silent = {
        (a, b): outcome(a, b, "silent") for a in range(size) for b in range(size) if (a + b) % 2
    }
    found = findings(size, silent)
    assert len(found) <= 9
    assert "more pairs" in found[-1].found


def test_clock_measurement() -> None:
    told = run_threads(3, measure_clocks)
    assert told[0] == told[1] == told[2]
    assert told[0][0] == 0
    assert all(abs(offset) < 5 for offset in told[0])


# -- star ---------------------------------------------------------------------------------------


class Letters:
    """Stands for an mpi4py communicator of ranks that are threads."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int, int], list[Any]]) -> None:
        self.rank, self.size, self.boxes = rank, size, boxes

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def isend(self, data: Any, to: int, tag: int) -> Any:
        self.boxes.setdefault((self.rank, to, tag), []).append(data)

        class Sent:
            def Test(self) -> bool:
                return True

        return Sent()

    def improbe(self, source: int, tag: int) -> Any:
        box = self.boxes.get((source, self.rank, tag))
        if not box:
            return None
        data = box.pop(0)

        class Message:
            def recv(self) -> Any:
                return data

        return Message()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_star(size: int) -> None:
    boxes: dict[tuple[int, int, int], list[Any]] = {}

    def main(boot: MemoryBootstrap) -> tuple[list[bytes], list[bytes]]:
        star = StarBootstrap(Letters(boot.rank, size, boxes), seconds=20)
        first = star.allgather(bytes([boot.rank]) * boot.rank)
        star.barrier()
        test = star.start_gather(b"%d" % boot.rank)
        while (second := test()) is None:
            time.sleep(0.001)
        return first, second

    for first, second in run_threads(size, main):
        assert first == [bytes([rank]) * rank for rank in range(size)]
        assert second == [b"%d" % rank for rank in range(size)]
    assert all(0 in pair[:2] for pair in boxes), "not to or from the first rank"


def test_part_of_a_star() -> None:
    boxes: dict[tuple[int, int, int], list[Any]] = {}

    def main(boot: MemoryBootstrap) -> list[bytes]:
        star = StarBootstrap(Letters(boot.rank, 5, boxes), seconds=20)
        part = star.split(boot.rank % 2, -boot.rank)
        told = part.allgather(b"%d" % boot.rank)
        assert told[part.rank] == b"%d" % boot.rank
        return told

    told = run_threads(5, main)
    assert told[0] == told[2] == told[4] == [b"4", b"2", b"0"]
    assert told[1] == told[3] == [b"3", b"1"]


def test_star_names_who_is_missing() -> None:
    star = StarBootstrap(Letters(0, 3, {}), seconds=0.05)
    with pytest.raises(TransferTimeout, match=r"no word from rank\(s\) 1, 2"):
        star.allgather(b"")
