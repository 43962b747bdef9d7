"""The checks of MPI, NCCL, Python's packages, and what ranks share."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rdmakit.doctor.model import Status
from rdmakit.drivers.python_report import PythonReport
from rdmakit.drivers.ucx_report import UcxReport
from rdmakit.process.mpi_report import MpiReport
from rdmakit.topology.model import Machine, NumaNode
from tests.unit.doctor_parts import (
    LIB,
    MPI,
    PYTHON,
    Children,
    check,
    context,
    gpu_machine,
    interface,
    rank,
    verdict,
    write,
)

FAIL, WARN, OK, SKIPPED = Status.FAIL, Status.WARN, Status.OK, Status.SKIPPED


def mpi(**changes: object) -> Children:
    return Children(mpi=msgspec.structs.replace(MPI, **changes))


# -- MPI ----------------------------------------------------------------------------------------

OPENMPI_JOB = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA_JOB = {"PMI_RANK": "0", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("family", "environ", "path_family", "status"),
    [
        ("openmpi", OPENMPI_JOB, "openmpi", OK),
        ("openmpi", OPENMPI_JOB, "mpich", OK),
        ("openmpi", {}, "openmpi", OK),
        ("openmpi", {}, "", OK),
        ("openmpi", {}, "mpich", WARN),
        ("mpich", {}, "openmpi", WARN),
        ("intel", {}, "mpich", OK),
        ("openmpi", HYDRA_JOB, "mpich", FAIL),
        ("mpich", OPENMPI_JOB, "openmpi", FAIL),
        ("mpich", HYDRA_JOB, "mpich", OK),
    ],
)
def test_launcher(
    tmp_path: Path, family: str, environ: dict[str, str], path_family: str, status: Status
) -> None:
    children = mpi(family=family, path_family=path_family)
    found = verdict("mpi.launcher", context(tmp_path, children=children, environ=environ))
    assert found[0] is status
    if status is not OK:
        assert found[2] == "start with /mpi/bin/mpirun"


def test_no_mpi(tmp_path: Path) -> None:
    children = Children(mpi=MpiReport(problem="mpi4py would find no MPI library"))
    status, _, cure = verdict("mpi.library", context(tmp_path, children=children))
    assert status is FAIL
    assert "rdmakit[openmpi]" in cure
    for name in ("mpi.launcher", "mpi.ucx"):
        assert verdict(name, context(tmp_path, children=children))[0] is SKIPPED


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, OK, "the same that rdmakit uses"),
        ({"evidence": "", "ucx": "", "ucx_directory": ""}, OK, "brings no UCX"),
        ({"ucx": "1.13.1", "ucx_directory": "/usr/lib"}, FAIL, "does not work with"),
        ({"ucx": "1.19.0", "ucx_directory": "/opt/ucx"}, WARN, "two releases do not fit"),
        ({"ucx_directory": "/opt/ucx"}, WARN, "rdmakit uses UCX 1.20.1 of /mpi/lib"),
    ],
)
def test_ucx_inside_mpi(
    tmp_path: Path, changes: dict[str, object], status: Status, words: str
) -> None:
    found = verdict("mpi.ucx", context(tmp_path, children=mpi(**changes)))
    assert found[0] is status
    assert words in found[1]


def test_ranks_with_different_mpi(tmp_path: Path) -> None:
    ranks = (rank(0, facts={"mpi": "Open MPI v5.0.11, package: a"}),
             rank(1, facts={"mpi": "Open MPI v4.1.4, package: b"}))  # fmt: skip
    assert verdict("mpi.library", context(tmp_path, ranks=ranks, job_size=2))[0] is FAIL
    assert verdict("mpi.library", context(tmp_path, ranks=ranks[:1]))[0] is OK


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({"OMPI_MCA_btl_tcp_if_include": "eth0"}, OK, ""),
        ({"OMPI_MCA_btl_tcp_if_include": "192.0.2.0/24"}, OK, ""),
        ({"OMPI_MCA_btl_tcp_if_include": "eth7"}, FAIL, "names no interface"),
        ({"OMPI_MCA_btl_tcp_if_include": "eth0,ib0"}, WARN, "ib0 names no interface"),
        ({"OMPI_MCA_oob_tcp_if_include": "10.9.0.0/16"}, FAIL, "names no interface"),
        ({"PRTE_MCA_prte_if_include": "eth7"}, FAIL, "names no interface"),
        ({"OMPI_MCA_pmll": "ob1"}, WARN, "perhaps pml"),
        ({"OMPI_MCA_pml": "ucxx"}, WARN, "perhaps ucx"),
        ({"OMPI_MCA_pml": "ob1"}, OK, ""),
        ({"OMPI_MCA_btl": "tcp"}, WARN, "has no self"),
        ({"OMPI_MCA_btl": "^openib"}, OK, ""),
        ({"OMPI_MCA_btl": "self,sm"}, WARN, "joins no nodes"),
        ({"OMPI_MCA_cpu_type": "x", "OMPI_MCA_num_procs": "2", "OMPI_MCA_PREFIXES": "a"}, OK, ""),
        ({"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_coll": "^han"}, OK, ""),
        ({"I_MPI_FABRICS": "shm"}, WARN, "joins no nodes"),
    ],
)
def test_mpi_settings(tmp_path: Path, environ: dict[str, str], status: Status, words: str) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", default=True)
    found = verdict("mpi.settings", context(tmp_path, environ=environ))
    assert found[0] is status
    assert words in found[1]


def test_mpi_settings_with_rdma(tmp_path: Path) -> None:
    for environ in ({"OMPI_MCA_pml": "ob1"}, {"FI_PROVIDER": "tcp"}):
        node = context(tmp_path, machine=gpu_machine(), environ=environ)
        status, found, _ = verdict("mpi.settings", node)
        assert status is WARN
        assert "mlx5_0:1, mlx5_1:1 would serve" in found


def test_pml_that_is_not_there(tmp_path: Path) -> None:
    node = context(tmp_path, children=mpi(evidence=""), environ={"OMPI_MCA_pml": "ucx"})
    assert verdict("mpi.settings", node)[0] is FAIL


@pytest.mark.parametrize(("ranks", "status"), [(1, OK), (4, OK), (5, WARN)])
def test_slots(tmp_path: Path, ranks: int, status: Status) -> None:
    machine = Machine("node", numa_nodes=(NumaNode(0, (0, 1, 2, 3)),))
    views = tuple(rank(n) for n in range(ranks))
    node = context(tmp_path, machine=machine, ranks=views, job_size=ranks)
    assert verdict("mpi.slots", node)[0] is status
    environ = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    calm = context(tmp_path, machine=machine, ranks=views, job_size=ranks, environ=environ)
    assert verdict("mpi.slots", calm)[0] is OK


# -- NCCL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({}, OK, ""),
        ({"NCCL_IB_DISABLE": "1"}, FAIL, "mlx5_0:1, mlx5_1:1 would serve"),
        ({"NCCL_IB_DISABLE": "0"}, OK, ""),
        ({"NCCL_NET": "Socket"}, FAIL, "over TCP"),
        ({"NCCL_P2P_DISABLE": "1"}, WARN, "host memory"),
        ({"NCCL_IB_HCA": "mlx5"}, OK, ""),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, OK, ""),
        ({"NCCL_IB_HCA": "^mlx5_0"}, OK, ""),
        ({"NCCL_IB_HCA": "^mlx5"}, FAIL, "leaves no RDMA device"),
        ({"NCCL_IB_HCA": "ibp1"}, FAIL, "leaves no RDMA device"),
        ({"NCCL_IB_HCA": "mlx5_0,mlx5_7"}, WARN, "mlx5_7 is no RDMA device"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, OK, ""),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, OK, ""),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, FAIL, "no interface of this node"),
        ({"NCCL_SOCKET_IFNAME": "docker0"}, FAIL, "this host only"),
        ({"NCCL_NET_GDR_LEVEL": "LOC"}, FAIL, "turns GPUDirect RDMA off"),
        ({"NCCL_NET_GDR_LEVEL": "PIX"}, OK, ""),
        ({"NCCL_NET_GDR_LEVEL": "SYS"}, OK, ""),
    ],
)
def test_nccl(tmp_path: Path, environ: dict[str, str], status: Status, words: str) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", default=True)
    interface(tmp_path, "docker0", "172.17.0.1", bridge=True)
    found = verdict("nccl.settings", context(tmp_path, machine=gpu_machine(), environ=environ))
    assert found[0] is status
    assert words in found[1]


def test_nccl_names(tmp_path: Path) -> None:
    environ = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCAS": "x", "NCCL_ABCDEFGHIJ": "1"}
    found = {f.status: f for f in check("nccl.names", context(tmp_path, environ=environ))}
    assert found[WARN].cure == "export NCCL_IB_HCA=x; unset NCCL_IB_HCAS"
    assert "NCCL_ABCDEFGHIJ" in found[Status.UNKNOWN].found
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0NCCL_DEBUG\0NCCL_ABCDEFGHIJ\0")
    python = msgspec.structs.replace(PYTHON, nccl=str(library))
    node = context(tmp_path, children=Children(python=python), environ=environ)
    assert [f.subject for f in check("nccl.names", node)] == ["NCCL_IB_HCAS"]


# -- Python -------------------------------------------------------------------------------------


def python(packages: dict[str, str], **more: object) -> Children:
    report = msgspec.structs.replace(PYTHON, packages={**PYTHON.packages, **packages}, **more)
    return Children(python=report)


def test_two_packages_of_one_module(tmp_path: Path) -> None:
    children = python({"cupy-cuda12x": "13.6", "cupy-cuda13x": "13.6", "ucxx-cu13": "0.52.0"})
    found = check("python.packages", context(tmp_path, children=children))
    assert [(f.status, f.subject) for f in found] == [(FAIL, "cupy"), (FAIL, "ucxx")]
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in found[0].cure


@pytest.mark.parametrize(("numpy", "status"), [("1.25.2", FAIL), ("1.26.4", OK), ("3.0", FAIL)])
def test_numpy(tmp_path: Path, numpy: str, status: Status) -> None:
    node = context(tmp_path, children=python({"numpy": numpy}))
    assert verdict("python.packages", node)[0] is status


@pytest.mark.parametrize(
    ("runtime", "driver", "status"),
    [(12080, 12040, OK), (12080, 13000, OK), (13000, 12080, FAIL), (13000, 0, Status.UNKNOWN)],
)
def test_cupy_and_driver(tmp_path: Path, runtime: int, driver: int, status: Status) -> None:
    name = f"cupy-cuda{runtime // 1000}x"
    children = python({name: "13.6"}, cupy="13.6", cuda_runtime=runtime, cuda_driver=driver)
    found = verdict("python.cuda", context(tmp_path, children=children, machine=gpu_machine()))
    assert found[0] is status
    if status is FAIL:
        assert "rdmakit[cuda12]" in found[2]


def test_why_the_driver_does_not_tell_its_cuda(tmp_path: Path) -> None:
    children = python({"cupy-cuda12x": "13.6"}, cupy="13.6", cuda_error="driverGetVersion: no")
    found = verdict("python.cuda", context(tmp_path, children=children, machine=gpu_machine()))
    assert found[0] is Status.UNKNOWN
    assert found[1].endswith("the driver's CUDA is not known: driverGetVersion: no")


def test_cupy_that_cannot_be_imported(tmp_path: Path) -> None:
    children = python({"cupy-cuda12x": "13.6"}, cupy_error="ImportError: libcublas.so.12")
    node = context(tmp_path, children=children, machine=gpu_machine())
    assert verdict("python.cuda", node)[0] is FAIL
    assert verdict("python.cuda", context(tmp_path, machine=gpu_machine()))[0] is WARN
    assert verdict("python.cuda", context(tmp_path))[0] is SKIPPED


def test_allocator(tmp_path: Path) -> None:
    ranks = (rank(0, facts={"allocator": "MemoryAsyncPool"}),)
    assert verdict("python.allocator", context(tmp_path, ranks=ranks))[0] is WARN
    ranks = (rank(0, facts={"allocator": "MemoryPool"}),)
    assert verdict("python.allocator", context(tmp_path, ranks=ranks))[0] is OK


def test_binding(tmp_path: Path) -> None:
    assert verdict("python.ucxx", context(tmp_path))[0] is OK
    old = python({"ucxx-cu12": "0.45.0"})
    assert verdict("python.ucxx", context(tmp_path, children=old))[0] is WARN
    other = python({"libucx-cu12": "1.21.0"})
    assert verdict("python.ucxx", context(tmp_path, children=other))[0] is OK
    status, _, cure = verdict(
        "python.ucxx", context(tmp_path, children=other, machine=gpu_machine())
    )
    assert status is WARN
    assert cure == "pip install 'libucx-cu12==1.20.1'"
    none = Children(python=PythonReport(python="3.12", packages={"numpy": "2.0"}))
    assert verdict("python.ucxx", context(tmp_path, children=none))[0] is WARN
    assert verdict("python.mpi4py", context(tmp_path, children=none))[0] is FAIL


def test_two_mpi_wheels(tmp_path: Path) -> None:
    children = python({"mpich": "5.0.2"})
    assert verdict("python.mpi4py", context(tmp_path, children=children))[0] is WARN


# -- what ranks share ---------------------------------------------------------------------------


def test_mps(tmp_path: Path) -> None:
    machine = gpu_machine()
    apart = tuple(rank(n) for n in range(2))
    shared = tuple(rank(n) for n in range(3))
    assert verdict("ipc.mps", context(tmp_path, machine=machine, ranks=apart))[0] is OK
    status, found, cure = verdict("ipc.mps", context(tmp_path, machine=machine, ranks=shared))
    assert status is WARN
    assert "2 ranks share a GPU" in found
    assert cure.startswith("nvidia-cuda-mps-control -d")
    write(tmp_path, "/tmp/nvidia-mps/control", "")
    assert verdict("ipc.mps", context(tmp_path, machine=machine, ranks=shared))[0] is OK


def namespaces(root: Path, process: int, **kinds: str) -> None:
    folder = root / f"proc/{process}/ns"
    folder.mkdir(parents=True)
    for kind, number in kinds.items():
        (folder / kind).symlink_to(f"{kind}:[{number}]")


def test_namespaces(tmp_path: Path) -> None:
    ranks = tuple(rank(n) for n in range(3))
    node = context(tmp_path, ranks=ranks, job_size=3)
    assert verdict("ipc.namespaces", node)[0] is Status.UNKNOWN
    for pid in (1000, 1001):
        namespaces(tmp_path, pid, pid="1", ipc="1", mnt="1")
    namespaces(tmp_path, 1002, pid="1", ipc="2", mnt="2")
    status, found, cure = verdict("ipc.namespaces", node)
    assert status is FAIL
    assert "rank(s) 2 have another IPC namespace" in found
    assert "PID" not in found
    assert "--ipc=host" in cure
    two = context(tmp_path, ranks=ranks[:2], job_size=2)
    assert verdict("ipc.namespaces", two)[0] is OK
    # What ranks say themselves counts more: their numbers are other processes' here.
    own = tuple(rank(n, facts={"processes": f"boot/pid:[{n // 2}]"}) for n in range(3))
    status, found, _ = verdict("ipc.namespaces", context(tmp_path, ranks=own, job_size=3))
    assert status is FAIL
    assert "rank(s) 2 have another PID namespace" in found
    assert "IPC namespace:" not in found


def test_gpus_that_are_hidden(tmp_path: Path) -> None:
    machine = gpu_machine()
    own = tuple(rank(n, environ={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(2))
    node = context(tmp_path, machine=machine, ranks=own, job_size=2)
    assert verdict("ipc.gpus", node)[0] is WARN
    every = tuple(rank(n) for n in range(2))
    node = context(tmp_path, machine=machine, ranks=every, job_size=2)
    assert verdict("ipc.gpus", node)[0] is OK
    none = (rank(0), rank(1, environ={"CUDA_VISIBLE_DEVICES": ""}))
    node = context(tmp_path, machine=machine, ranks=none, job_size=2)
    assert verdict("ipc.gpus", node)[0] is FAIL


def test_shared_memory(tmp_path: Path) -> None:
    ranks = tuple(rank(n) for n in range(2))
    node = context(tmp_path, ranks=ranks, job_size=2)
    assert verdict("ipc.shm", node)[0] is Status.UNKNOWN
    line = "30 29 0:{} / /dev/shm rw - tmpfs tmpfs rw\n"
    write(tmp_path, "/proc/1000/mountinfo", line.format(26))
    write(tmp_path, "/proc/1001/mountinfo", line.format(26))
    assert verdict("ipc.shm", node)[0] is OK
    write(tmp_path, "/proc/1001/mountinfo", line.format(99))
    status, _, cure = verdict("ipc.shm", node)
    assert status is FAIL
    assert "--ipc=host" in cure


def test_a_ucx_that_is_not_there_is_no_alarm_of_mpi(tmp_path: Path) -> None:
    children = Children(UcxReport(problem="none"))
    status, found, _ = verdict("mpi.ucx", context(tmp_path, children=children))
    assert status is OK
    assert LIB in found
