"""Decisions from a topology: which ports are the fabric, which rank gets what."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.topology.cores import give_cores
from rdmakit.topology.cpulist import format_cpus, parse_cpus, parse_mask, share_cpus
from rdmakit.topology.fabric import Fabric, classify
from rdmakit.topology.facts import NvmlFacts, NvmlGpu, merge_nvml
from rdmakit.topology.health import judge_port
from rdmakit.topology.model import Gid, Gpu, Machine, Matrix, MigDevice, Nic, NumaNode, Port
from rdmakit.topology.netdevices import choose_net_devices, read_net_devices
from rdmakit.topology.placement import Placement, place_ranks
from rdmakit.topology.rails import assign_rails, match_rails
from rdmakit.topology.ranks import Node, RankFacts, ranks_of
from rdmakit.topology.visible import hidden_peers, visible_gpus
from rdmakit.topology.words import Path, pcie_gbytes, relation_of


def port(rate: float = 400, layer: str = "InfiniBand", **change: object) -> Port:
    return replace(Port(1, "ACTIVE", "LinkUp", rate, layer), **change)  # type: ignore[arg-type]


DOWN = {"state": "DOWN", "phys": "Polling"}


def machine(
    relations: list[list[str]],
    ports: list[Port | None] | None = None,
    *,
    host: str = "n0",
    cpus: str = "0-31",
    between: str = "SYS",
    **nic: object,
) -> Machine:
    """Return a machine with ``relations[gpu][nic]``; ports as given, all active by default."""
    gpus = tuple(
        Gpu(
            i,
            "GPU X",
            f"GPU-{host}-{i}",
            f"0000:{i + 1:02x}:00.0",
            cpu_affinity=cpus,
            numa=0,
            cpus=parse_cpus(cpus),
        )
        for i in range(len(relations))
    )
    count = len(relations[0]) if relations else len(ports or ())
    given = ports if ports is not None else [port()] * count
    nics = tuple(
        Nic(f"mlx5_{i}", f"mlx5_{i}", model="MT4129", ports=() if p is None else (p,), **nic)  # type: ignore[arg-type]
        for i, p in enumerate(given)
    )
    names = [g.label for g in gpus] + [n.label for n in nics]
    cells: list[list[str | None]] = [["SYS"] * len(names) for _ in names]
    for i in range(len(names)):
        cells[i][i] = "X"
    for g, row in enumerate(relations):
        for n, cell in enumerate(row):
            cells[g][len(gpus) + n] = cells[len(gpus) + n][g] = cell
    for a in range(len(nics)):
        for b in range(len(nics)):
            if a != b:
                cells[len(gpus) + a][len(gpus) + b] = between
    matrix = Matrix(tuple(names), tuple(map(tuple, cells)))
    return Machine(host, gpus, nics, matrix, (NumaNode(0, parse_cpus(cpus) or ()),))


def place(*machines: Machine, ranks: list[tuple[RankFacts, ...]] | None = None) -> Placement:
    nodes, first = [], 0
    for index, one in enumerate(machines):
        own = ranks[index] if ranks is not None else ranks_of(one)
        own = tuple(replace(facts, rank=first + i) for i, facts in enumerate(own))
        first += len(own)
        nodes.append(Node(one, classify(one), own))
    return place_ranks(nodes)


def roles(one: Machine, *chosen: str) -> dict[str, str]:
    return {p.nic: p.role for p in classify(one, chosen).ports}


PAIRS = [["PXB", "PXB", *["SYS"] * 4]] * 2 + [["SYS"] * 2 + ["PXB", "PXB"] + ["SYS"] * 2] * 2

# -- words and CPUs ------------------------------------------------------------------------------


def test_words_are_ordered_by_distance() -> None:
    order = ["X", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS"]
    paths = [relation_of(word).path for word in order]  # type: ignore[union-attr]
    assert paths == sorted(paths)
    assert relation_of("SOC") == relation_of("SYS")
    for word in ("OK", "GNS", "NV0", "NVx", "", None, "PIXX"):
        assert relation_of(word) is None


def test_pcie_rates() -> None:
    assert pcie_gbytes(32.0, 16) == pytest.approx(63.0, rel=0.01)
    assert pcie_gbytes(2.5, 1) == 0.25
    assert pcie_gbytes(None, 16) is None
    assert pcie_gbytes(33.0, 16) is None


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    if cpus:
        assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))
    words = []
    value = sum(1 << cpu for cpu in cpus)
    while value or not words:
        words.append(f"{value & 0xFFFFFFFF:08x}")
        value >>= 32
    assert parse_mask(",".join(reversed(words))) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-99999", "1,,2", "0-168-2231", "-1", None])
def test_bad_cpu_lists_are_none(text: str | None) -> None:
    assert parse_cpus(text) is None


@given(st.integers(1, 12), st.integers(1, 24), st.booleans())
def test_cores_are_shared_without_overlap(parts: int, cores: int, known: bool) -> None:
    cpus = [*range(cores), *range(64, 64 + cores)]
    siblings = [(core, core + 64) for core in range(cores)] if known else []
    shares = share_cpus(cpus, parts, siblings)
    assert len(shares) == parts
    given_out = [cpu for share in shares for cpu in share]
    if parts <= 2 * cores:
        assert sorted(given_out) == cpus
        assert all(shares)
    if parts <= cores:
        # Both threads of a core stay with one rank.
        for share in shares:
            assert {cpu % 64 for cpu in share if cpu < 64} == {cpu % 64 for cpu in share}
            assert sum(cpu < 64 for cpu in share) * 2 == len(share)


# -- the compute fabric --------------------------------------------------------------------------


def test_storage_pair_bond_and_vf_are_told_apart() -> None:
    one = machine([[*row] for row in PAIRS], between="PIX")
    assert roles(one) == {
        "mlx5_0": "compute",
        "mlx5_1": "compute",
        "mlx5_2": "compute",
        "mlx5_3": "compute",
        "mlx5_4": "storage",
        "mlx5_5": "storage",
    }
    bond = Nic("mlx5_bond_0", "mlx5_bond_0", model="MT4129", ports=(port(200, "Ethernet"),))
    virtual = Nic("mlx5_9", "mlx5_9", model="MT4129", virtual_of="0000:01:00.0", ports=(port(),))
    more = replace(one, nics=(*one.nics, bond, virtual))
    assert roles(more)["mlx5_bond_0"] == "bond"
    assert roles(more)["mlx5_9"] == "vf"


def test_a_bond_is_the_fabric_where_it_is_all_there_is() -> None:
    bond = Nic("mlx5_bond_0", "mlx5_bond_0", ports=(port(200, "Ethernet"),))
    fabric = classify(Machine(nics=(bond,)))
    assert [p.role for p in fabric.ports] == ["compute"]
    assert fabric.usable[0].device == "mlx5_bond_0:1"


def test_slower_and_other_layers_are_not_rails() -> None:
    ports = [port(), port(), port(100, "Ethernet"), port(100, "Ethernet")]
    one = machine([], ports)
    assert list(roles(one).values()) == ["compute", "compute", "other", "other"]
    managed = replace(one, nics=(*one.nics[:2], replace(one.nics[2], default_route=True)))
    assert roles(managed)["mlx5_2"] == "management"


def test_down_port_keeps_its_rail_and_is_not_used() -> None:
    one = machine([], [port(), port(40, **DOWN), port()])
    fabric = classify(one)
    assert [p.role for p in fabric.ports] == ["compute"] * 3
    assert [p.title for p in fabric.usable] == ["mlx5_0:1", "mlx5_2:1"]
    assert fabric.ports[1].rate_gbps == 400
    assert "1 of 3 down: mlx5_1:1 (Polling)" in fabric.verdict


def test_half_rate_among_equals_is_degraded() -> None:
    fabric = classify(machine([], [port()] * 7 + [port(200)]))
    assert fabric.ports[7].health.degraded
    assert fabric.ports[7].health.healthy is False
    assert "1 of 8 degraded" in fabric.verdict
    assert fabric.ports[7].usable


def test_cards_of_another_kind_may_be_slower() -> None:
    one = machine([], [port(), port(200, "Ethernet")])
    assert not any(p.health.degraded for p in classify(one).ports)


@pytest.mark.parametrize(
    ("change", "healthy", "word"),
    [
        ({}, True, ""),
        ({"state": "Active", "phys": "Polling"}, False, "contradiction"),
        ({"state": "INIT"}, False, "subnet manager"),
        ({"state": "DOWN", "phys": "LinkUp"}, False, "link that is up"),
        ({"state": "DOWN", "phys": "Disabled"}, False, "Disabled"),
        ({"state": None, "phys": None}, None, "not in the text"),
        ({"state": "PORT_ACTIVE", "phys": "LINK_UP"}, True, ""),
        ({"active_mtu": 1024, "max_mtu": 4096}, True, "MTU 1024"),
        ({"default_gid": "unknown"}, True, "no GID"),
    ],
)
def test_port_health(change: dict[str, object], healthy: bool | None, word: str) -> None:
    found = judge_port(port(**change))
    assert found.healthy is healthy
    assert word in found.why


def test_users_choice_of_nics_wins() -> None:
    one = machine([[*row] for row in PAIRS], between="PIX")
    found = classify(one, ("mlx5_4", "mlx5_5:1", "nonesuch"))
    assert [p.nic for p in found.compute] == ["mlx5_4", "mlx5_5"]
    assert [p.nic for p in classify(one, ("mlx5_[0-2]",)).compute] == ["mlx5_0", "mlx5_1", "mlx5_2"]


def test_unnamed_and_named_devices_are_not_mixed_up() -> None:
    unnamed = machine([["PIX", "NODE"], ["NODE", "PIX"]], [None, None])
    nics = tuple(replace(n, label=f"NIC{i}", name=None) for i, n in enumerate(unnamed.nics))
    names = ("GPU0", "GPU1", "NIC0", "NIC1")
    named = Nic("mlx5_0", "mlx5_0", ports=(port(),))
    one = replace(unnamed, nics=(*nics, named), matrix=replace(unnamed.matrix, names=names))
    placed = place(one)
    assert [r.nics for r in placed.ranks] == [("NIC0",), ("NIC1",)]
    assert [r.net_devices for r in placed.ranks] == [None, None]


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
