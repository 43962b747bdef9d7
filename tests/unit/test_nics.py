"""Network devices of a job's ranks, chosen on fake machines by the code that a job runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit import nics
from rdmakit.config import Config
from rdmakit.discovery import sysfs
from rdmakit.drivers.host import HostTree
from rdmakit.errors import ConnectError, InvalidArgument
from rdmakit.inter import ucx
from rdmakit.memory import MemoryBootstrap, run_threads
from rdmakit.topology import placement
from rdmakit.topology.assemble import assemble
from rdmakit.topology.confine import Confinement, confine
from rdmakit.topology.fabric import classify
from rdmakit.topology.ranks import Node, RankFacts
from tests.unit import fake_machines as fakes

COMPUTE = [f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9)]
EVERY = ("eth0", "lo", *(f"mlx5_{i}:1" for i in range(10)))


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_NET_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def offers(monkeypatch: pytest.MonkeyPatch, *devices: str) -> None:
    monkeypatch.setattr(nics, "offered_devices", lambda policy, *, virtual: devices)


Choice = tuple[tuple[str, ...], tuple[str, ...]]


def chosen(trees: Sequence[HostTree], local: int, config: Config | None = None) -> Choice:
    """Return what ``local`` ranks on each machine choose, who must agree."""
    machines = [tuple(range(m * local, (m + 1) * local)) for m in range(len(trees))]

    def main(boot: MemoryBootstrap) -> Choice:
        number = boot.rank // local
        return nics.choose_nics(
            boot,
            config or Config(),
            f"node{number}",
            machines,
            virtual=False,
            tree=trees[number],
        )

    found = run_threads(local * len(trees), main)
    assert set(found) == {found[0]}
    return found[0]


def node(root: Path, ranks: Sequence[int]) -> Node:
    machine = assemble(sysfs.read_sysfs(HostTree(root)))
    return Node(machine, classify(machine), tuple(RankFacts(rank) for rank in ranks))


def test_dgx_a100_gives_eight_of_its_ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, *EVERY)
    trees = []
    for name in ("a", "b"):
        fakes.dgx_a100(tmp_path / name, name)
        trees.append(HostTree(tmp_path / name))
    devices, notes = chosen(trees, 8)
    assert devices == (*COMPUTE, *COMPUTE)
    assert len(notes) == 1
    assert notes[0].startswith("network devices: mlx5_0:1 local rank 0; mlx5_1:1 local rank 1; ")
    assert "PXB, nearest of 8 compute port(s)" in notes[0]
    assert "\n" not in notes[0]


def two_nics(root: Path) -> HostTree:
    """Eight GPUs on two sockets, with one InfiniBand port each."""
    m = fakes.Fake(root)
    m.base("two")
    cpus = ["0-31", "32-63"]
    m.cpus(cpus)
    m.driver()
    for socket in range(2):
        top = m.bridge(f"pci0000:{0x10 + 0x40 * socket:02x}/0000:{0x10 + 0x40 * socket:02x}:00.0")
        up = m.bridge(f"{top}/0000:{0x11 + 0x40 * socket:02x}:00.0", numa=socket)
        for slot in range(4):
            bus = 0x12 + 0x40 * socket + slot
            m.gpu(f"{up}/0000:{bus:02x}:00.0", "A100", numa=socket, cpus=cpus[socket])
        m.nic(f"{up}/0000:{0x1F + 0x40 * socket:02x}:00.0", f"mlx5_{socket}", numa=socket)
    return HostTree(root)


def test_two_ports_serve_eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, *EVERY)
    trees = [two_nics(tmp_path / name) for name in "ab"]
    devices, notes = chosen(trees, 8)
    assert devices == (*["mlx5_0:1"] * 4, *["mlx5_1:1"] * 4) * 2
    assert "mlx5_0:1 local ranks 0 1 2 3; mlx5_1:1 local ranks 4 5 6 7" in notes[0]


def test_users_own_devices_stand_and_far_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers(monkeypatch, *EVERY)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")
    fakes.dgx_a100(tmp_path)
    devices, notes = chosen([HostTree(tmp_path)] * 2, 8)
    assert devices == ()
    assert any("rank 0: UCX_NET_DEVICES gives mlx5_9, SYS from GPU0" in text for text in notes)
    assert len(notes) == 9
    assert notes[-1] == "and 4 more"  # 12 of 16 ranks: it is near GPU6 and GPU7
    monkeypatch.setenv("UCX_NET_DEVICES", ",".join(COMPUTE))
    assert chosen([HostTree(tmp_path)] * 2, 8) == ((), ())


def test_users_own_devices_on_some_ranks_leave_the_others_free(tmp_path: Path) -> None:
    fakes.dgx_a100(tmp_path)
    nodes = [node(tmp_path, range(8)), node(tmp_path, range(8, 16))]
    found = confine(nodes, ["mlx5_0:1", *[None] * 15], [EVERY] * 16)
    assert found.devices == ()
    assert "UCX_NET_DEVICES is set on rank 0 only" in found.notes[0]


def test_ucx_with_tcp_alone_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, "eth0", "lo")
    fakes.dgx_a100(tmp_path)
    devices, notes = chosen([HostTree(tmp_path)] * 2, 8)
    assert devices == ()
    assert "chosen for no rank; rank 0: UCX chooses among eth0, lo" in notes[0]
    assert "mlx5_0:1 would serve, but this UCX has no such device" in notes[1]


def test_one_rank_whose_ucx_lacks_a_device_frees_all(tmp_path: Path) -> None:
    fakes.dgx_a100(tmp_path)
    nodes = [node(tmp_path, range(8)), node(tmp_path, range(8, 16))]
    found = confine(nodes, [None] * 16, [*[EVERY] * 11, ("eth0",), *[EVERY] * 4])
    assert found.devices == ()
    assert "rank 11: UCX chooses among eth0" in found.notes[0]
    assert confine(nodes, [None] * 16, [*[EVERY] * 15, None]) == Confinement()


def test_ucx_that_cannot_be_asked_is_not_confined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(policy: str, *, virtual: bool) -> tuple[str, ...]:
        raise ConnectError("no context")

    monkeypatch.setattr(nics, "offered_devices", broken)
    fakes.dgx_a100(tmp_path)
    assert chosen([HostTree(tmp_path)] * 2, 2) == ((), ())


@pytest.mark.parametrize("make", [fakes.virtual_machine, fakes.nothing, fakes.workstation])
def test_without_rdma_nothing_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: object
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("looked at")

    monkeypatch.setattr(nics, "offered_devices", never)
    monkeypatch.setattr("rdmakit.machines.gather", never)
    make(tmp_path)  # type: ignore[operator]
    read: list[str] = []

    class Tree(HostTree):
        def listdir(self, path: str) -> tuple[str, ...]:
            read.append(path)
            return super().listdir(path)

        read_text = exists = read_bytes = resolve = never  # type: ignore[assignment]

    tree = Tree("/")
    tree.locate = lambda path: tmp_path / path.lstrip("/")  # type: ignore[method-assign]
    assert chosen([tree] * 2, 2) == ((), ())
    assert set(read) == {"/sys/class/infiniband"}
    assert chosen([tree] * 2, 2, Config(nics="mlx5_0"))[1] == (
        "RDMAKIT_NICS=mlx5_0: no RDMA port is active on any node",
    )


def test_ports_that_are_down_are_no_rdma(tmp_path: Path) -> None:
    m = fakes.Fake(tmp_path)
    m.base("down")
    m.nic("pci0000:10/0000:10:00.0", "mlx5_0", state="1: DOWN")
    assert not nics.has_active_port(HostTree(tmp_path))
    m.nic("pci0000:10/0000:11:00.0", "mlx5_1")
    assert nics.has_active_port(HostTree(tmp_path))


def test_one_node_without_rdma_keeps_tcp_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers(monkeypatch, *EVERY)
    fakes.dgx_a100(tmp_path / "a")
    fakes.workstation(tmp_path / "b")
    devices, notes = chosen([HostTree(tmp_path / name) for name in "ab"], 2)
    assert devices == ()
    assert "rank 2: UCX chooses: no RDMA port here" in notes[0]


def test_link_layers_do_not_mix(tmp_path: Path) -> None:
    for name, layer in (("a", "InfiniBand"), ("b", "Ethernet")):
        m = fakes.Fake(tmp_path / name)
        m.base(name)
        m.nic("pci0000:10/0000:10:00.0", "mlx5_0", layer=layer)
    nodes = [node(tmp_path / "a", [0]), node(tmp_path / "b", [1])]
    found = confine(nodes, [None] * 2, [EVERY] * 2)
    assert found.devices == ()
    assert "rank 0 has InfiniBand, rank 1 has Ethernet" in found.notes[0]


def test_rails_that_are_subnets_are_given_to_every_rank(tmp_path: Path) -> None:
    """Storage ports are still left out; one rank on each node keeps its own rail."""
    for number, name in enumerate("ab", 1):
        fakes.hgx_h100(tmp_path / name, name, roce=True, number=number)
    nodes = [node(tmp_path / "a", range(8)), node(tmp_path / "b", range(8, 16))]
    found = confine(nodes, [None] * 16, [EVERY] * 16)
    assert [own.split(",")[0] for own in found.devices] == COMPUTE * 2
    assert {frozenset(own.split(",")) for own in found.devices} == {frozenset(COMPUTE)}
    assert "every rank has all rails" in found.notes[0]
    alone = [node(tmp_path / "a", [0]), node(tmp_path / "b", [1])]
    assert confine(alone, [None] * 2, [EVERY] * 2).devices == ("mlx5_0:1", "mlx5_0:1")


def test_virtual_nodes_of_one_machine(tmp_path: Path) -> None:
    """Ranks are placed over the whole machine, however it is cut."""
    fakes.dgx_a100(tmp_path / "ib")
    found = confine([node(tmp_path / "ib", range(8))], [None] * 8, [EVERY] * 8)
    assert found.devices == tuple(COMPUTE)
    fakes.hgx_h100(tmp_path / "roce", roce=True)
    found = confine([node(tmp_path / "roce", range(8))], [None] * 8, [EVERY] * 8)
    assert {frozenset(own.split(",")) for own in found.devices} == {frozenset(COMPUTE)}


def test_named_ports_and_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, *EVERY)
    fakes.dgx_a100(tmp_path)
    trees = [HostTree(tmp_path)] * 2
    devices, _ = chosen(trees, 2, Config.from_env({"RDMAKIT_NICS": "mlx5_4:1, mlx5_5"}))
    assert set(devices) <= {"mlx5_4:1", "mlx5_5:1"}
    assert len(devices) == 4
    assert chosen(trees, 2, Config.from_env({"RDMAKIT_NICS": "OFF"})) == ((), ())
    devices, notes = chosen(trees, 2, Config(nics="mlx4_0"))
    assert devices == ()
    assert "chosen for no rank" in notes[0]
    with pytest.raises(InvalidArgument, match="RDMAKIT_NICS"):
        Config(nics=" , ")


def test_failure_in_the_looking_or_the_choice_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("bad facts")

    offers(monkeypatch, *EVERY)
    fakes.dgx_a100(tmp_path)
    trees = [HostTree(tmp_path)] * 2
    with monkeypatch.context() as patch:
        patch.setattr("rdmakit.machines.read_sysfs", broken)
        devices, notes = chosen(trees, 2)
    assert devices == ()
    assert "node0 cannot be read: ZeroDivisionError: bad facts" in notes[0]
    monkeypatch.setattr(placement, "choose_ports", broken)
    devices, notes = chosen(trees, 2)
    assert devices == ()
    assert notes == ("network devices: UCX chooses; ZeroDivisionError in the choice: bad facts",)


_MADE: dict[str, Node] = {}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_all_or_none_and_only_what_is_offered(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    names = list(fakes.MACHINES)
    picked = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    counts = data.draw(st.lists(st.integers(1, 9), min_size=len(picked), max_size=len(picked)))
    nodes, first = [], 0
    for name, count in zip(picked, counts, strict=True):
        if name not in _MADE:
            root = tmp_path_factory.mktemp(name)
            fakes.MACHINES[name](root)
            _MADE[name] = node(root, [])
        ranks = tuple(RankFacts(rank) for rank in range(first, first + count))
        nodes.append(replace(_MADE[name], ranks=ranks))
        first += count
    offered = [
        tuple(data.draw(st.sampled_from([EVERY, EVERY, EVERY, ("eth0",)]))) for _ in range(first)
    ]
    found = confine(nodes, [None] * first, offered)
    assert len(found.devices) in (0, first)
    for own, there in zip(found.devices, offered, strict=bool(found.devices)):
        assert own
        assert set(own.split(",")) <= set(there)
    assert all("\n" not in text for text in found.notes)


# -- UCX -----------------------------------------------------------------------------------------


def test_context_has_the_devices_unless_the_user_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ucx.context_config(virtual=False, devices="mlx5_0:1")["NET_DEVICES"] == "mlx5_0:1"
    assert "NET_DEVICES" not in ucx.context_config(virtual=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")
    assert "NET_DEVICES" not in ucx.context_config(virtual=False, devices="mlx5_0:1")


def test_devices_are_read_from_what_ucx_prints() -> None:
    text = """#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 2  dev 2  flags -- rc_mlx5/mlx5_0:1
#      resource 3  :  md 2  dev 2  flags -- ud_verbs/mlx5_0:1
#      resource 4  :  md 3  dev 3  flags -- cuda_ipc/cuda
#      resource 5  :  md 4  dev 4  flags -- rc_verbs/mlx5_10:2
"""
    assert list(dict.fromkeys(ucx._NETWORK.findall(text))) == ["eth0", "mlx5_0:1", "mlx5_10:2"]
