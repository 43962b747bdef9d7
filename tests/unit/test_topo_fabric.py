"""Words, CPU lists and which ports carry the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.topology.cpulist import format_cpus, parse_cpus, parse_mask, share_cpus
from rdmakit.topology.fabric import classify
from rdmakit.topology.health import judge_port
from rdmakit.topology.model import Machine, Nic
from rdmakit.topology.words import pcie_gbytes, relation_of
from tests.unit.topo_cases import (
    DOWN,
    PAIRS,
    machine,
    place,
    port,
    roles,
)

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
    physical = replace(one.nics[0], pci="0000:01:00.0")
    more = replace(one, nics=(physical, *one.nics[1:], bond, virtual))
    assert roles(more)["mlx5_bond_0"] == "bond"
    assert roles(more)["mlx5_9"] == "vf"


def test_a_virtual_function_is_the_fabric_where_its_physical_one_is_not() -> None:
    virtual = Nic(
        "mlx5_9", "mlx5_9", pci="0000:01:00.4", virtual_of="0000:01:00.0", ports=(port(),)
    )
    assert roles(Machine(nics=(virtual,))) == {"mlx5_9": "compute"}
    nowhere = Nic("mlx5_0", "mlx5_0", ports=(port(100, "Ethernet"),))
    assert roles(Machine(nics=(nowhere, virtual))) == {"mlx5_0": "other", "mlx5_9": "compute"}
    physical = Nic("mlx5_8", "mlx5_8", pci="0000:01:00.0", ports=(port(),))
    assert roles(Machine(nics=(physical, virtual))) == {"mlx5_8": "compute", "mlx5_9": "vf"}


@pytest.mark.parametrize(("layer", "role"), [("InfiniBand", "compute"), ("Ethernet", "bond")])
def test_a_bond_of_ipoib_merges_no_devices(layer: str, role: str) -> None:
    one = machine([], [port(layer=layer)] * 8)
    nics = tuple(
        replace(nic, bond="bond0" if index in (2, 5) else None)
        for index, nic in enumerate(one.nics)
    )
    found = roles(replace(one, nics=nics))
    assert [found[nic.label] for nic in nics] == [role if nic.bond else "compute" for nic in nics]


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


HDR, HDR100 = "MT_0000000223", "MT_0000000222"


def boards(*cards: tuple[float, str]) -> Machine:
    """Return ConnectX-6 cards of (rate, board)."""
    one = machine([], [port(rate) for rate, _ in cards])
    nics = zip(one.nics, cards, strict=True)
    return replace(
        one, nics=tuple(replace(nic, model="MT4123", board=own) for nic, (_, own) in nics)
    )


def test_boards_of_one_type_have_other_rates() -> None:
    one = boards((200, HDR), (200, HDR), (100, HDR100), (100, HDR100))
    healths = [own.health for own in classify(one).ports]
    assert [(own.healthy, own.degraded) for own in healths] == [(True, False)] * 4
    one = boards((200, HDR), (200, HDR), (100, HDR), (100, HDR100))
    assert [own.health.degraded for own in classify(one).ports] == [False, False, True, False]


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
