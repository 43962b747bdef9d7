"""Machines of a few lines, for placement and the choice of ports."""

from __future__ import annotations

from dataclasses import replace

from rdmakit.topology.cpulist import parse_cpus
from rdmakit.topology.fabric import classify
from rdmakit.topology.model import Gpu, Machine, Matrix, Nic, NumaNode, Port
from rdmakit.topology.placement import Placement, place_ranks
from rdmakit.topology.ranks import Node, RankFacts, ranks_of


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
