"""What a benchmark run was asked for; checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rdmakit.config import format_size, parse_size
from rdmakit.datatypes import ITEMSIZES, check_reduction, dtype_of, op_of
from rdmakit.devices import parse_map
from rdmakit.errors import InvalidArgument
from rdmakit.plan.planner import ALGORITHMS
from rdmakit.proof.words import REQUIREMENTS
from rdmakit.report.files import FORMATS

__all__ = ["DEVICES", "LAYERS", "Options"]

LAYERS = ("memory", "intra", "inter", "allreduce", "broadcast")
ON_HOST = ("auto", *ALGORITHMS, "mpi")
ON_GPU = ("registered", "staged", "nccl", "mpi")
CHOICES = tuple(dict.fromkeys((*ON_HOST, *ON_GPU)))
DEVICES = ("auto", "gpu", "cpu")
DEFAULT_BUDGET = 36.0
"""Seconds: with 16 ranks on two cores the default run then ends within 60."""
_LARGEST = {"cpu": 64 << 20, "gpu": 1 << 30}


@dataclass(frozen=True)
class Options:
    """A checked set of options."""

    begin: int = 8
    end: int = 0
    """Largest size; 0: as the device has it by default, until it is placed."""
    factor: int = 2
    iterations: int = 20
    warmup: int = 5
    check: int = 1
    op: str = "sum"
    dtype: str = "float32"
    layers: tuple[str, ...] = LAYERS
    algorithms: tuple[str, ...] = ()
    """Empty: all that apply."""
    time_budget: float = DEFAULT_BUDGET
    output: Path | None = None
    quiet: bool = False
    device: str = "cpu"
    """cpu, gpu, or auto before the ranks have agreed."""
    gpu_map: tuple[str, ...] = ()
    """GPU of each local rank of a host, in turn; empty: chosen."""
    require: str = ""
    """What must be proven of the path between nodes: rdma, gdr, or nothing."""
    end_given: bool = False
    """Whether somebody asked for the largest size."""

    @classmethod
    def of(
        cls,
        *,
        begin: str,
        end: str | None,
        factor: int,
        iterations: int,
        warmup: int,
        check: int,
        op: str,
        dtype: str,
        layers: tuple[str, ...],
        algorithms: tuple[str, ...],
        time_budget: float,
        output: str | None,
        quiet: bool,
        device: str = "cpu",
        gpu_map: str | None = None,
        require: str | None = None,
    ) -> Options:
        """Check what the command line gave.

        Raises:
            InvalidArgument: something does not fit; the text names the option.
        """
        element, operation = dtype_of(dtype), op_of(op)
        check_reduction(element, operation)
        smallest, largest = _size("-b", begin), 0 if end is None else _size("-e", end)
        if end is not None:
            _check_order(smallest, largest)
        for name, value, least in (
            ("-b", smallest, element.itemsize),
            ("-f", factor, 2),
            ("-n", iterations, 1),
            ("-w", warmup, 0),
        ):
            if value < least:
                raise InvalidArgument(f"{name} {value}: at least {least}")
        if not 0 < time_budget < math.inf:
            raise InvalidArgument(f"--time-budget {time_budget:g}: seconds, more than 0")
        _check_known("--layer", layers, LAYERS)
        _check_known("--algorithm", algorithms, CHOICES)
        _check_known("--device", (device,), DEVICES)
        _check_known("--require", () if require is None else (require,), REQUIREMENTS)
        if gpu_map is not None and device == "cpu":
            raise InvalidArgument("--gpu-map names GPUs, but --device cpu takes none")
        if require == "gdr" and device == "cpu":
            raise InvalidArgument("--require gdr asks for GPU arrays, but --device cpu takes none")
        return cls(
            begin=smallest,
            end=largest,
            factor=factor,
            iterations=iterations,
            warmup=warmup,
            check=check,
            op=operation.value,
            dtype=element.name,
            layers=layers or LAYERS,
            algorithms=algorithms,
            time_budget=time_budget,
            output=_file(output),
            quiet=quiet,
            device=device,
            gpu_map=() if gpu_map is None else parse_map(gpu_map),
            require=require or "",
            end_given=end is not None,
        )

    def placed(self, device: str) -> Options:
        """Return this for ``device``, on which the ranks have agreed.

        Raises:
            InvalidArgument: something does not fit it.
        """
        end = self.end or _LARGEST[device]
        _check_order(self.begin, end)
        known: Sequence[str] = ON_GPU if device == "gpu" else ON_HOST
        for name in self.algorithms:
            if name not in known:
                raise InvalidArgument(
                    f"--algorithm {name!r}: with {'GPU' if device == 'gpu' else 'host'} arrays one "
                    f"of {', '.join(known)}"
                )
        layers = self.layers
        if device == "gpu" and layers == LAYERS:
            layers = tuple(name for name in layers if name != "broadcast")  # of host arrays
        return replace(self, device=device, end=end, layers=layers)

    def sizes(self) -> list[int]:
        """Return the byte counts, each a whole number of elements."""
        itemsize = ITEMSIZES[self.dtype]
        sizes, size = [], self.begin
        while size <= self.end:
            sizes.append(size // itemsize * itemsize)
            size *= self.factor
        return sizes

    def one_size(self, default: int) -> int:
        """Return the bytes of rows of one size: the largest, ``default`` if none was asked for.

        Where no size of the run is as small as that, its smallest. Pure.
        """
        sizes = self.sizes()
        most = sizes[-1] if self.end_given else default
        return max((size for size in sizes if size <= most), default=sizes[0])


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except InvalidArgument as exc:
        raise InvalidArgument(f"{option}: {exc}") from exc


def _check_known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InvalidArgument(f"{option} {name!r}: one of {', '.join(known)}")


def _file(output: str | None) -> Path | None:
    path = Path(output) if output else None
    if path is not None and path.suffix not in FORMATS:
        raise InvalidArgument(f"--output {path}: name ends in {', '.join(FORMATS)}")
    return path


def _check_order(begin: int, end: int) -> None:
    if begin > end:
        raise InvalidArgument(
            f"-b {format_size(begin)} is above -e {format_size(end)}; sizes go up"
        )
