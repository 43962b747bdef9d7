"""Decisions from a topology: which ports are the fabric, which rank gets what."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.topology.cores import give_cores
from rdmakit.topology.cpulist import parse_cpus
from rdmakit.topology.fabric import Fabric, classify
from rdmakit.topology.facts import NvmlFacts, NvmlGpu, merge_nvml
from rdmakit.topology.model import Gid, Gpu, Machine, MigDevice, Nic, NumaNode
from rdmakit.topology.netdevices import choose_net_devices, read_net_devices
from rdmakit.topology.placement import Placement
from rdmakit.topology.rails import assign_rails, match_rails
from rdmakit.topology.ranks import RankFacts, ranks_of
from rdmakit.topology.visible import hidden_peers, visible_gpus
from rdmakit.topology.words import Path
from tests.unit.topo_cases import (
    DOWN,
    machine,
    place,
    port,
)

# -- ranks, rails --------------------------------------------------------------------------------


def test_dgx_a100_uses_eight_of_ten() -> None:
    rows = [
        ["PXB" if nic // 2 == pair and nic < 8 else "SYS" for nic in range(10)]
        for pair in range(4)
        for _ in range(2)
    ]
    found = place(machine(rows, between="PIX"))
    assert [r.net_devices for r in found.ranks] == [(f"mlx5_{i}:1",) for i in range(8)]


@pytest.mark.parametrize("word", ["PHB", "NODE", "SYS"])
def test_two_nics_for_eight_gpus_carry_four_each(word: str) -> None:
    found = place(machine([[word, word]] * 8))
    assert Counter(r.nics for r in found.ranks) == {("mlx5_0:1",): 4, ("mlx5_1:1",): 4}


def test_idle_nic_is_used_only_if_known_to_be_up() -> None:
    rows = [["PIX", "PHB"]] * 4
    found = place(machine(rows))
    assert Counter(r.nics for r in found.ranks) == {("mlx5_0:1",): 2, ("mlx5_1:1",): 2}
    unknown = place(machine(rows, [None, None]))
    assert {r.nics for r in unknown.ranks} == {("mlx5_0:1",)}
    assert any("mlx5_1:1" in note for note in unknown.notes)


def test_nearest_nic_whatever_the_order_of_names() -> None:
    # Even NICs on the first socket, odd ones on the second, NIC 0 with nobody.
    near = {0: 2, 1: 4, 2: 1, 3: 3}
    rows = [["PIX" if near[g] == n else "NODE" for n in range(5)] for g in range(4)]
    found = place(machine(rows))
    assert [r.nics for r in found.ranks] == [(f"mlx5_{near[g]}:1",) for g in range(4)]
    assert all(r.path is Path.PIX for r in found.ranks)


def test_spare_nics_go_to_the_ranks_they_are_near_to() -> None:
    found = place(machine([["PIX", "PIX", "SYS", "SYS"], ["SYS", "SYS", "PIX", "PIX"]]))
    assert [r.nics for r in found.ranks] == [("mlx5_0:1", "mlx5_1:1"), ("mlx5_2:1", "mlx5_3:1")]


def test_rail_that_is_down_on_one_node_is_left_by_all() -> None:
    rows = [["PIX" if a == b else "NODE" for b in range(4)] for a in range(4)]
    good = machine(rows, host="a")
    bad = machine(rows, [port(), port(40, **DOWN), port(), port()], host="b")
    found = place(good, bad)
    first = [r.nics for r in found.ranks[:4]]
    assert first == [r.nics for r in found.ranks[4:]]
    assert ("mlx5_1:1",) not in first
    assert any("mlx5_1:1 is not used on any node" in n and "b" in n for n in found.notes)


def addressed(host: int, order: list[int]) -> Machine:
    """Return a machine whose i-th NIC is in subnet 10.0.<order[i]>.0/24."""
    ports = [
        port(100, "Ethernet", gids=(Gid(3, f"::ffff:10.0.{net}.{host}", "RoCE v2"),))
        for net in order
    ]
    rows = [["PIX" if a == b else "NODE" for b in range(len(order))] for a in range(len(order))]
    return machine(rows, ports, host=f"h{host}")


def test_rails_are_matched_by_subnet_before_names() -> None:
    machines = [addressed(1, [0, 1, 2]), addressed(2, [2, 0, 1])]
    rails, _ = match_rails(machines, [classify(m) for m in machines])
    pairs = [tuple(p.nic for p in rail.ports if p) for rail in rails]
    assert pairs == [("mlx5_0", "mlx5_1"), ("mlx5_1", "mlx5_2"), ("mlx5_2", "mlx5_0")]
    assert all(rail.separate and rail.match.startswith("subnet 10.0.") for rail in rails)
    found = place(*machines)
    by_local = [(a.nics, b.nics) for a, b in zip(found.ranks[:3], found.ranks[3:], strict=True)]
    assert set(by_local) <= {((f"{a}:1",), (f"{b}:1",)) for a, b in pairs}


def test_rails_by_name_where_subnets_say_nothing() -> None:
    machines = [machine([["PIX"]], host="a"), machine([["PIX"]], host="b")]
    rails, _ = match_rails(machines, [classify(m) for m in machines])
    assert [(rail.match, rail.separate) for rail in rails] == [("device mlx5_0:1", False)]


def test_missing_device_does_not_shift_the_rails_behind_it() -> None:
    rows = [["PIX" if a == b else "NODE" for b in range(4)] for a in range(4)]
    whole = machine(rows, host="a")
    lacking = replace(whole, host="b", nics=(*whole.nics[:1], *whole.nics[2:]))
    found = place(whole, lacking)
    for a, b in zip(found.ranks[:4], found.ranks[4:], strict=True):
        assert a.nics == b.nics
    assert [found.ranks[i].nics for i in (0, 2, 3)] == [(f"mlx5_{i}:1",) for i in (0, 2, 3)]
    renamed = replace(
        whole,
        host="c",
        nics=tuple(replace(n, label=f"ib{i}", name=f"ib{i}") for i, n in enumerate(whole.nics)),
        matrix=replace(
            whole.matrix, names=(*whole.matrix.names[:4], *(f"ib{i}" for i in range(4)))
        ),
    )
    other = place(whole, renamed)
    assert [r.nics for r in other.ranks[4:]] == [(f"ib{i}:1",) for i in range(4)]


def test_most_rails_broken_somewhere_leaves_each_node_alone() -> None:
    rows = [["PIX" if a == b else "NODE" for b in range(4)] for a in range(4)]
    first = machine(rows, [port(), port(), port(40, **DOWN), port(40, **DOWN)], host="a")
    second = machine(rows, [port(40, **DOWN), port(40, **DOWN), port(), port()], host="b")
    found = place(first, second)
    assert any("placed alone" in note for note in found.notes)
    assert {r.nics for r in found.ranks[:4]} == {("mlx5_0:1",), ("mlx5_1:1",)}
    assert {r.nics for r in found.ranks[4:]} == {("mlx5_2:1",), ("mlx5_3:1",)}


@settings(deadline=None)
@given(
    st.integers(1, 10).flatmap(
        lambda rails: st.lists(
            st.lists(st.sampled_from([2, 3, 4, 5, 6, None]), min_size=rails, max_size=rails),
            min_size=1,
            max_size=16,
        )
    )
)
def test_assignment_is_nearest_and_as_even_as_can_be(costs: list[list[int | None]]) -> None:
    taken = assign_rails(costs, [False] * len(costs[0]))
    assert len(taken) == len(costs)
    load = Counter(taken)
    value = [[99 if c is None else c for c in row] for row in costs]
    for rank, rail in enumerate(taken):
        assert value[rank][rail] == min(value[rank])
        for other, cost in enumerate(value[rank]):
            # No rank could go to an equally near rail that has two fewer.
            assert cost > min(value[rank]) or load[other] >= load[rail] - 1
    sure = assign_rails(costs, [True] * len(costs[0]))
    load = Counter(sure)
    if max(load.values()) >= 2:
        known = [r for r in range(len(costs[0])) if all(row[r] is not None for row in costs)]
        assert all(load[r] > 0 for r in known), "a port idles beside one with two ranks"


def test_uneven_nodes_and_more_ranks_than_gpus() -> None:
    rows = [["PIX" if a == b else "NODE" for b in range(4)] for a in range(4)]
    big, small = machine(rows, host="a"), machine(rows[:3], host="b")
    found = place(big, small)
    assert [r.gpu for r in found.ranks] == ["GPU0", "GPU1", "GPU2", "GPU3", "GPU0", "GPU1", "GPU2"]
    assert found.ranks[2].nics == found.ranks[6].nics
    double = place(big, ranks=[ranks_of(big, 8)])
    assert Counter(r.gpu for r in double.ranks) == {f"GPU{i}": 2 for i in range(4)}
    assert any("2 ranks share GPU0" in note for note in double.notes)
    cpus = [cpu for r in double.ranks for cpu in r.cores]
    assert len(cpus) == len(set(cpus)) == 32


def test_ranks_without_gpu_take_the_nics_of_their_numa_node() -> None:
    one = Machine(
        "cpu",
        nics=(
            Nic("mlx5_0", "mlx5_0", numa=1, ports=(port(),)),
            Nic("mlx5_1", "mlx5_1", numa=0, ports=(port(),)),
        ),
        numa_nodes=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3))),
    )
    found = place(one, ranks=[ranks_of(one, 2)])
    assert [(r.nics, r.cores) for r in found.ranks] == [
        (("mlx5_1:1",), (0, 1)),
        (("mlx5_0:1",), (2, 3)),
    ]


def test_cores_follow_the_gpus_even_if_all_are_on_one_socket() -> None:
    one = replace(
        machine([["PIX"]] * 4, cpus="18-35,54-71"),
        numa_nodes=(NumaNode(0, tuple(range(18))), NumaNode(1, parse_cpus("18-35,54-71") or ())),
    )
    shares = give_cores(one, ["GPU0", "GPU1", "GPU2", "GPU3"], [None] * 4, None)
    every = [cpu for share in shares for cpu in share.cpus]
    assert sorted(every) == sorted(parse_cpus("18-35,54-71") or ())


def test_memory_only_numa_node_is_nobodys_place() -> None:
    gpu = Gpu(0, numa=1, gpu_numa_id="1")
    one = Machine(gpus=(gpu,), numa_nodes=(NumaNode(0, tuple(range(8))), NumaNode(1, ())))
    (share,) = give_cores(one, ["GPU0"], [None], None)
    assert share.cpus == tuple(range(8))


def test_binding_far_from_the_gpu_is_said() -> None:
    one = machine([["PIX"]], cpus="0-3")
    found = place(one, ranks=[(RankFacts(0, cpus=(8, 9)),)])
    assert any("bound to CPUs that are all far" in note for note in found.notes)


def test_placement_is_a_pure_function() -> None:
    rows = [["PIX" if a == b else "NODE" for b in range(4)] for a in range(4)]
    machines = [machine(rows, host=f"n{i}") for i in range(3)]
    assert place(*machines) == place(*machines)


# -- visibility ----------------------------------------------------------------------------------

GPUS = tuple(
    Gpu(i, "H100", f"GPU-{uuid}", f"0000:{i:02x}:00.0")
    for i, uuid in enumerate(["8f0a", "8f1b", "77aa", "0c0c"])
)


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        ("3", ("GPU3",)),
        ("3,2,1,0", ("GPU3", "GPU2", "GPU1", "GPU0")),
        ("GPU-77", ("GPU2",)),
        ("GPU-8f", ()),  # of two GPUs
        ("1,GPU-0c0c", ("GPU1", "GPU3")),
        ("0,9,1", ("GPU0",)),
        ("0,-1,1", ("GPU0",)),
        ("", ()),
        ("-1", ()),
        ("2,2", ("GPU2",)),
    ],
)
def test_cuda_visible_devices(value: str, labels: tuple[str, ...]) -> None:
    assert visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": value}).gpus == labels


def test_order_of_different_models_is_not_guessed() -> None:
    mixed = (GPUS[0], replace(GPUS[1], name="T4"))
    assert visible_gpus(mixed, {}).gpus is None
    assert visible_gpus(mixed, {"CUDA_VISIBLE_DEVICES": "1"}).gpus is None
    env = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_gpus(mixed, env).gpus == ("GPU1",)
    assert visible_gpus(mixed, {"CUDA_VISIBLE_DEVICES": "GPU-8f1b"}).gpus == ("GPU1",)


def test_mig_devices_are_named_by_uuid_and_one_counts() -> None:
    mig = (MigDevice("1g.10gb", "MIG-aa-1"), MigDevice("1g.10gb", "MIG-aa-2"))
    gpus = (replace(GPUS[0], mig=mig, mig_mode=True), GPUS[1])
    found = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "MIG-aa-2,MIG-aa-1"})
    assert (found.gpus, found.devices) == (("GPU0",), ("MIG-aa-2",))
    assert "one MIG device only" in found.note
    old = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8f0a/1/0"})
    assert old.gpus == ("GPU0",)


def test_nic_of_the_visible_gpu_not_of_ordinal_zero() -> None:
    rows = [["PIX" if a == b else "NODE" for b in range(4)] for a in range(4)]
    one = machine(rows)
    ranks = tuple(RankFacts(i, (f"GPU{3 - i}",), (f"GPU-n0-{3 - i}",)) for i in range(4))
    found = place(one, ranks=[ranks])
    assert [r.nics for r in found.ranks] == [(f"mlx5_{3 - i}:1",) for i in range(4)]
    assert [r.ordinal for r in found.ranks] == [0] * 4
    assert any("sees one GPU" in note for note in found.notes)


def test_hidden_peers() -> None:
    assert "one GPU per" in hidden_peers([("a",), ("b",)])
    assert not hidden_peers([("a", "b"), ("a", "b")])
    assert not hidden_peers([("a",), ("a",)])
    assert not hidden_peers([("a",)])


def test_mig_ranks_and_their_note() -> None:
    mig = (MigDevice("3g", "MIG-1"), MigDevice("3g", "MIG-2"))
    one = Machine("m", (replace(GPUS[0], mig=mig, mig_mode=True),))
    found = place(one)
    assert [(r.gpu, r.device) for r in found.ranks] == [("GPU0", "MIG-1"), ("GPU0", "MIG-2")]
    assert any("no P2P, CUDA IPC or NVLink" in note for note in found.notes)


def test_views_of_ranks_with_one_gpu_each_are_joined() -> None:
    views = [
        NvmlFacts(gpus=(NvmlGpu(0, uuid=f"GPU-{i}", pci=f"0000:0{9 - i}:00.0"),)) for i in range(3)
    ]
    merged = merge_nvml(views)
    assert [(g.index, g.uuid) for g in merged.gpus] == [(0, "GPU-2"), (1, "GPU-1"), (2, "GPU-0")]
    assert merge_nvml([merged, views[0]]) == merged


# -- UCX_NET_DEVICES -----------------------------------------------------------------------------


def near_machine() -> tuple[Machine, Fabric, Placement]:
    rows = [["PIX" if a == b else "SYS" for b in range(2)] for a in range(2)]
    one = machine(rows)
    return one, classify(one), place(one)


def test_net_devices_of_a_rank() -> None:
    one, fabric, placed = near_machine()
    found = choose_net_devices(placed.ranks[1], one, fabric)
    assert (found.value, found.warnings) == ("mlx5_1:1", ())
    offered = choose_net_devices(placed.ranks[1], one, fabric, offered=["mlx5_1:1", "eth0"])
    assert offered.value == "mlx5_1:1"


def test_ucx_without_infiniband_is_not_confined() -> None:
    one, fabric, placed = near_machine()
    found = choose_net_devices(placed.ranks[0], one, fabric, offered=["eth0", "lo"])
    assert found.value is None
    assert "no such device" in found.warnings[0]


@pytest.mark.parametrize(
    ("user", "word"),
    [
        ("mlx5_0:1", "SYS from GPU1"),
        ("mlx5_1", "write mlx5_1:1"),
        ("^mlx5_0", "knows no ^"),
        ("mlx5_*", "knows no patterns"),
        ("", "no network device"),
    ],
)
def test_users_choice_is_kept_and_warned_about(user: str, word: str) -> None:
    one, fabric, placed = near_machine()
    found = choose_net_devices(placed.ranks[1], one, fabric, user)
    assert found.value is None
    assert any(word in warning for warning in found.warnings), found.warnings


def test_good_choice_of_the_user_gets_no_warning() -> None:
    one, fabric, placed = near_machine()
    for user in ("mlx5_1:1", "mlx5_1:1,mlx5_0:1", "all"):
        assert not choose_net_devices(placed.ranks[1], one, fabric, user).warnings
    asked = choose_net_devices(placed.ranks[1], one, fabric, "bond9:1", offered=["eth0"])
    assert "this UCX has eth0" in asked.warnings[0]
    slow = choose_net_devices(placed.ranks[1], one, fabric, "eth0", offered=["eth0", "mlx5_1:1"])
    assert "none of this node's RDMA ports, as mlx5_1:1" in slow.warnings[0]
    assert len(slow.warnings) == 1
    assert read_net_devices("all") == (None, [])


def test_unknown_names_are_left_to_ucx() -> None:
    one, fabric, placed = near_machine()
    lost = replace(placed.ranks[0], net_devices=None)
    found = choose_net_devices(lost, one, fabric)
    assert found.value is None
    assert "not known" in found.reason
