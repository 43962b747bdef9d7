"""What all cases share: the communicator, the options, the budget, and how a row is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.bench.budget import Budget
from rdmakit.bench.gpus import GpuSide
from rdmakit.bench.measure import Group, Samples, measure
from rdmakit.bench.options import Options
from rdmakit.bench.path import RunPath
from rdmakit.bench.statistics import bus_factor, rate, times_of
from rdmakit.communicator import Communicator
from rdmakit.datatypes import ReduceOp, dtype_of, op_of
from rdmakit.drivers.host import HostTree
from rdmakit.report.schema import Row

__all__ = ["Case", "Session", "nothing"]

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
    """Bytes that each rank allocates on its host, for each byte of ``nbytes``."""
    on_gpu: float = 2.0
    """The same on its GPU, in a run with GPU arrays."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What the case is, whatever its size."""
        return self.layer, self.name, self.algorithm


def nothing(layer: str, name: str, reason: str, algorithm: str = "") -> Case:
    """Return a case that cannot be run here."""

    def run(session: Session, case: Case) -> Row:
        return session.row(case, skipped=reason)

    return Case(layer, name, algorithm, 0, run)


@dataclass
class Session:
    """One benchmark run on this rank."""

    comm: Communicator
    options: Options
    budget: Budget
    group: Group
    gpus: GpuSide | None = None
    """With GPU arrays: the job's GPUs."""
    path: RunPath | None = None
    """What was proven of the path between nodes."""
    dtype: np.dtype[Any] = field(init=False)
    op: ReduceOp = field(init=False)

    def __post_init__(self) -> None:
        self.dtype, self.op = dtype_of(self.options.dtype), op_of(self.options.op)
        tree = HostTree()
        hosts = self.comm.hosts
        self._ranks_here = hosts.count(self.comm.host)
        self._cache = _last_level_cache(tree)
        self._free = _available(tree)
        self._opened: dict[str, Any] = {}

    @property
    def gpu(self) -> GpuSide:
        """The job's GPUs, in a run with GPU arrays."""
        assert self.gpus is not None
        return self.gpus

    def array(self, count: int) -> npt.NDArray[Any]:
        """Return an array whose pages exist."""
        array = np.empty(count, self.dtype)
        array.fill(0)
        return array

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned at the first call with ``name``; closed by :meth:`release`.

        Collective where ``make`` is. Its time is not the row's.
        """
        if name not in self._opened:
            with self.budget.setting_up():
                self._opened[name] = make()
        return self._opened[name]

    def release(self) -> None:
        """Close what :meth:`once` has made. Collective, blocking."""
        opened, self._opened = self._opened, {}
        for part in reversed(opened.values()):
            part.close()

    def agreed(self, problem: str) -> str:
        """Return the first rank's problem, on all ranks, or nothing. Collective."""
        told = self.group.share(problem)
        bad = [rank for rank, text in enumerate(told) if text]
        if not bad:
            return ""
        text = str(told[bad[0]])
        return text if set(told) == {text} else f"rank {bad[0]}: {text}"

    def why_not_mapped(self) -> str:
        """Return why ranks of a node do not address each other's GPUs, or nothing. Collective.

        Known from the first call on GPU arrays, which :func:`rdmakit.bench.gpus.warm_up` makes.
        """
        staged = self.comm.node.device_way == "host-staged"
        text = "GPU memory cannot be mapped between these ranks: see the notes"
        return self.agreed(text if staged else "")

    def waited(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return ``call`` so that it returns when the GPU is done, found by polling."""
        synchronize = self.comm.synchronize

        def run() -> None:
            call()
            synchronize()

        return run

    def timed(self, call: Callable[[], object], *, apart: bool = False) -> Samples:
        """Measure ``call`` on all ranks within the next share of the budget. Collective.

        ``apart`` as :func:`rdmakit.bench.measure.measure` has it.
        """
        return measure(
            call,
            self.group,
            iterations=self.options.iterations,
            warmup=self.options.warmup,
            allotment=self.group.first(self.budget.share()),
            apart=apart,
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
            if self._cached(case):
                note = f"{note}, {CACHED}" if note else CACHED
        return Row(
            layer=case.layer,
            case=case.name,
            algorithm=case.algorithm,
            transport=transport,
            path="" if skipped or self.path is None else self.path.of(case.layer, case.algorithm),
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
            **({} if self.gpus is None else self.gpus.row_fields),
            **fields,
        )

    def _cached(self, case: Case) -> bool:
        if self.gpus is None:
            return case.nbytes * case.memory * self._ranks_here <= self._cache
        return case.nbytes * case.on_gpu * self.gpus.sharing <= self.gpus.cache

    def why_skip(self, case: Case) -> str:
        """Return why ``case`` is not run; empty to run it. Collective."""
        lacking, skip = 1.0, 2.0
        places = [("on the host", case.memory * self._ranks_here, self._free)]
        if self.gpus is not None:
            places.append(("on the GPU", case.on_gpu * self.gpus.sharing, self.gpus.free))
        mine, where, need, free = 0.0, "", 0.0, 0.0
        for place, factor, room in places:
            if not mine and case.nbytes * factor > _ROOM * room:
                mine, where, need, free = lacking, place, case.nbytes * factor, room
        if not mine and self.group.rank == 0 and not self.budget.worth():
            mine = skip
        reasons = self.group.share([mine, where, need, free])
        for rank, (reason, where, need, free) in enumerate(reasons):
            if reason == lacking:
                return (
                    f"{need / 1e9:.1f} GB needed {where} of rank {rank}, {free / 1e9:.1f} GB free"
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
