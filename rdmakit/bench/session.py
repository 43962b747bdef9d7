"""What all cases share: the communicator, the options, the budget, and how a row is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.bench.budget import Budget
from rdmakit.bench.measure import Group, Samples, measure
from rdmakit.bench.options import Options
from rdmakit.bench.statistics import bus_factor, rate, times_of
from rdmakit.communicator import Communicator
from rdmakit.datatypes import ReduceOp, dtype_of, op_of
from rdmakit.drivers.host import HostTree
from rdmakit.report.schema import Row

__all__ = ["Case", "Session"]

_ROOM = 0.8
"""Share of the free memory of a host that a case may use."""
CACHED = "in cache"


@dataclass(frozen=True)
class Case:
    """One row to be made. ``run`` is collective over the job; the rest is equal on all ranks."""

    layer: str
    name: str
    algorithm: str
    nbytes: int
    run: Callable[[Session, Case], Row]
    memory: float = 2.0
    """Bytes that each rank allocates, for each byte of ``nbytes``."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What the case is, whatever its size."""
        return self.layer, self.name, self.algorithm


@dataclass
class Session:
    """One benchmark run on this rank."""

    comm: Communicator
    options: Options
    budget: Budget
    group: Group
    dtype: np.dtype[Any] = field(init=False)
    op: ReduceOp = field(init=False)

    def __post_init__(self) -> None:
        self.dtype, self.op = dtype_of(self.options.dtype), op_of(self.options.op)
        tree = HostTree()
        hosts = self.comm.hosts
        self._ranks_here = hosts.count(self.comm.host)
        self._cache = _last_level_cache(tree)
        self._free = _available(tree)

    def array(self, count: int) -> npt.NDArray[Any]:
        """Return an array whose pages exist."""
        array = np.empty(count, self.dtype)
        array.fill(0)
        return array

    def timed(self, call: Callable[[], object]) -> Samples:
        """Measure ``call`` on all ranks within the next share of the budget. Collective."""
        return measure(
            call,
            self.group,
            iterations=self.options.iterations,
            warmup=self.options.warmup,
            allotment=self.group.first(self.budget.share()),
        )

    def row(
        self,
        case: Case,
        *,
        samples: Samples | None = None,
        payload: int | None = None,
        ranks: int | None = None,
        divide: int = 1,
        sent: int | None = None,
        wrong: int | None = None,
        transport: str = "",
        skipped: str = "",
        note: str = "",
    ) -> Row:
        """Return the row of ``case``.

        Args:
            case: which.
            samples: what was measured.
            payload: bytes that one call moves; default: the case's size.
            ranks: ranks that take part in one operation.
            divide: a call is so many times the thing whose time is shown (a ping-pong: 2).
            sent: bytes that the busiest rank sends to other nodes in one call.
            wrong: elements with a wrong value, over all ranks.
            transport: what carried the bytes.
            skipped: why it was not run.
            note: more for the reader.
        """
        layout = self.comm.layout
        ranks = layout.size if ranks is None else ranks
        reduces = case.name in ("allreduce", "reduce_scatter", "rail allreduce", "add")
        fields: dict[str, Any] = {}
        if samples is not None:
            times = times_of([s / divide for s in samples.seconds])
            algbw = rate(case.nbytes if payload is None else payload / divide, times.median)
            factor = bus_factor(case.name.removeprefix("rail "), ranks)
            fields = {
                "iterations": samples.calls,
                "first_use_us": round(samples.first / divide * 1e6, 1),
                "time_us": times,
                "algbw_GBps": algbw,
                "busbw_GBps": float(f"{algbw * factor:.5g}"),
                "wire_GBps": None if sent is None else rate(sent / divide, times.median),
            }
            if case.nbytes * case.memory * self._ranks_here <= self._cache:
                note = f"{note}, {CACHED}" if note else CACHED
        return Row(
            layer=case.layer,
            case=case.name,
            algorithm=case.algorithm,
            transport=transport,
            nbytes=case.nbytes,
            count=case.nbytes // self.dtype.itemsize,
            dtype=self.dtype.name,
            wire_dtype=self.dtype.name,
            op="sum" if case.name == "add" else self.op.value if reduces else "",
            ranks=ranks,
            nodes=len(layout.nodes),
            ranks_per_node=layout.describe(),
            wrong=wrong,
            skipped=skipped,
            note=note,
            **fields,
        )

    def why_skip(self, case: Case) -> str:
        """Return why ``case`` is not run; empty to run it. Collective."""
        need = case.nbytes * case.memory * self._ranks_here
        lacking, skip = 1.0, 2.0
        mine = lacking if need > _ROOM * self._free else 0.0
        if not mine and self.group.rank == 0 and not self.budget.worth():
            mine = skip
        reasons = self.group.share([mine, need, self._free])
        for rank, (reason, need, free) in enumerate(reasons):
            if reason == lacking:
                return (
                    f"{need / 1e9:.1f} GB needed on the host of rank {rank}, "
                    f"{free / 1e9:.1f} GB free"
                )
        return "time budget" if reasons[0][0] == skip else ""

    def wrong(self, mine: int) -> int:
        """Return the wrong elements of all ranks. Collective."""
        return self.group.total(mine)


def _available(tree: HostTree) -> float:
    for line in (tree.read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return float("inf")


def _last_level_cache(tree: HostTree) -> int:
    sizes = [0]
    base = "/sys/devices/system/cpu/cpu0/cache"
    for entry in tree.listdir(base):
        text = (tree.read_text(f"{base}/{entry}/size") or "").strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)
