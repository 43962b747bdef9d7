"""The checks of UCX and its settings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.doctor.catalog import CHECKS
from rdmakit.doctor.model import Status
from rdmakit.doctor.run import run_check
from rdmakit.doctor.ucx_words import allowed_transports, near, not_available, unknown_settings
from rdmakit.drivers.host import CommandResult
from rdmakit.drivers.ucx_report import UcxModuleReport, UcxReport, ask_ucx
from rdmakit.topology.model import Gid, Machine, Nic, Port
from rdmakit.topology.texts import read_texts
from tests.unit.doctor_parts import (
    NAMES,
    RDMA_UCX,
    UCX,
    Children,
    check,
    context,
    gpu_machine,
    interface,
    rank,
    verdict,
)
from tests.unit.fake_machines import MACHINES

SOFT = ("ucx.", "mpi.", "nccl.", "python.", "ipc.", "net.")
FAIL, WARN, OK = Status.FAIL, Status.WARN, Status.OK


def test_a_healthy_node(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", default=True)
    ranks = tuple(rank(n) for n in range(2))
    node = context(tmp_path, ranks=ranks, job_size=4)
    bad = [
        finding
        for one in CHECKS
        if one.id.startswith(SOFT)
        for finding in run_check(one, node)
        if finding.status in (FAIL, WARN)
    ]
    assert bad == []


@pytest.mark.parametrize("name", MACHINES)
def test_machines_of_files_only(name: str, tmp_path: Path) -> None:
    from rdmakit.discovery.collect import read_machines

    MACHINES[name](tmp_path)
    (found,) = read_machines(tmp_path)
    node = context(tmp_path, machine=found.machine, texts=found.texts, live=False)
    for one in CHECKS:
        if one.id.startswith(SOFT):
            for finding in run_check(one, node):
                assert finding.status in (OK, Status.SKIPPED), finding


def test_children_are_asked_once(tmp_path: Path) -> None:
    children = Children()
    node = context(tmp_path, children=children)
    for one in CHECKS:
        if one.id.startswith(SOFT):
            run_check(one, node)
    reports = [name for name in children.asked if name.startswith("rdmakit.")]
    assert sorted(reports) == sorted(set(reports))


# -- UCX_TLS ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tls", "status", "words"),
    [
        ("all", OK, ""),
        ("self,sm", FAIL, "no transport between nodes"),
        ("sm", FAIL, "no transport between nodes"),
        ("^tcp", FAIL, "no transport between nodes"),
        ("tcp,self", WARN, "no shared memory"),
        ("tcp,sm", WARN, "no self"),
        ("tcp,sm,self", OK, ""),
        ("tcp,sm,self,cuda", WARN, "no CUDA"),
        ("tpc,sm,self", FAIL, "no transport between nodes"),
        ("tcp,sm,self,rc_mlx", WARN, "this UCX has no rc_mlx"),
    ],
)
def test_tls(tmp_path: Path, tls: str, status: Status, words: str) -> None:
    found = verdict("ucx.tls", context(tmp_path, environ={"UCX_TLS": tls}))
    assert found[0] is status
    assert words in found[1]


def test_tls_on_one_host_is_no_failure(tmp_path: Path) -> None:
    ranks = (rank(0), rank(1))
    node = context(tmp_path, environ={"UCX_TLS": "self,sm"}, ranks=ranks, job_size=2)
    assert verdict("ucx.tls", node)[0] is WARN


@pytest.mark.parametrize(
    ("tls", "status", "words", "cure"),
    [
        ("rc,sm,self,cuda", OK, "", ""),
        ("tcp,sm,self,cuda", FAIL, "shuts RDMA out", "tcp,sm,self,cuda,rc"),
        ("sm,self,cuda", FAIL, "no transport between nodes", "sm,self,cuda,rc"),
        ("rc,sm,self", WARN, "has no cuda", "rc,sm,self,cuda"),
    ],
)
def test_tls_with_rdma(tmp_path: Path, tls: str, status: Status, words: str, cure: str) -> None:
    node = context(
        tmp_path, children=Children(RDMA_UCX), machine=gpu_machine(), environ={"UCX_TLS": tls}
    )
    found = verdict("ucx.tls", node)
    assert found[0] is status
    assert words in found[1]
    assert cure in found[2]


OFFERED = ("self", "tcp", "posix", "sysv", "cma", "rc_verbs", "rc_mlx5", "cuda_copy")


@settings(deadline=None)
@given(st.sets(st.sampled_from(OFFERED)))
def test_named_and_left_out_make_all(names: set[str]) -> None:
    text = ",".join(sorted(names))
    picked, missing = allowed_transports(text or None, OFFERED)
    left, none = allowed_transports(f"^{text}", OFFERED)
    assert missing == none == ()
    assert set(picked) == (names or set(OFFERED))
    assert set(left) == set(OFFERED) - names


def test_names_for_several() -> None:
    assert allowed_transports("rc", OFFERED)[0] == ("rc_verbs", "rc_mlx5")
    assert allowed_transports("\\rc_mlx5,ud:aux", OFFERED) == (("rc_mlx5",), ())
    assert allowed_transports("sm", OFFERED)[0] == ("posix", "sysv", "cma")
    assert allowed_transports("^knem,nothing", OFFERED) == (OFFERED, ("nothing",))


# -- UCX_NET_DEVICES ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "status", "words", "cure"),
    [
        ("eth0", OK, "", ""),
        ("all", OK, "", ""),
        ("mlx5_0:1", FAIL, "mlx5_0:1 is no device of this node", "UCX_NET_DEVICES=eth0"),
        ("eht0", FAIL, "perhaps eth0", "UCX_NET_DEVICES=eth0"),
        ("eth0,eth7", WARN, "eth7 is no device", "UCX_NET_DEVICES=eth0"),
        ("eth1", FAIL, "eth1 is down", "UCX_NET_DEVICES=eth0"),
        ("docker0", FAIL, "this host only", "UCX_NET_DEVICES=eth0"),
        ("lo", FAIL, "leads to this host only", "UCX_NET_DEVICES=eth0"),
        ("", FAIL, "no network device at all", "UCX_NET_DEVICES=eth0"),
        ("eth*", FAIL, "no patterns", "UCX_NET_DEVICES=eth0"),
    ],
)
def test_net_devices(tmp_path: Path, value: str, status: Status, words: str, cure: str) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", default=True)
    interface(tmp_path, "eth1", up=False)
    interface(tmp_path, "docker0", "172.17.0.1", bridge=True)
    found = verdict("ucx.net_devices", context(tmp_path, environ={"UCX_NET_DEVICES": value}))
    assert found[0] is status
    assert words in found[1]
    assert cure in found[2]


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        ("mlx5_0:1,mlx5_1:1", OK, ""),
        ("mlx5_0", FAIL, "write mlx5_0:1"),
        ("eth0", FAIL, "none of this node's RDMA ports"),
    ],
)
def test_net_devices_with_rdma(tmp_path: Path, value: str, status: Status, words: str) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", default=True)
    environ = {"UCX_NET_DEVICES": value}
    node = context(tmp_path, children=Children(RDMA_UCX), machine=gpu_machine(), environ=environ)
    found = verdict("ucx.net_devices", node)
    assert found[0] is status
    assert words in found[1]


def test_net_device_that_is_down(tmp_path: Path) -> None:
    environ = {"UCX_NET_DEVICES": "mlx5_0:1"}
    node = context(tmp_path, machine=gpu_machine(up=False), environ=environ)
    status, found, _ = verdict("ucx.net_devices", node)
    assert status is FAIL
    assert "mlx5_0:1 is not usable" in found


# -- names and settings -------------------------------------------------------------------------


def test_names(tmp_path: Path) -> None:
    environ = {
        "UCX_TLS": "all",
        "UCX_RNDV_THRES": "8k",
        "UCX_HOME": "/opt/ucx",
        "UCX_RC_TX_QUEUE_LEN": "4",
        "UCX_IB_TX_QUEUE_LEN": "4",
        "UCX_CUDA_COPY_ANYTHING": "1",
        "UCX_QWERTZUIOP": "1",
    }
    found = {f.subject: f for f in check("ucx.names", context(tmp_path, environ=environ))}
    assert set(found) == {"UCX_RNDV_THRES", "UCX_QWERTZUIOP"}
    assert found["UCX_RNDV_THRES"].cure == "export UCX_RNDV_THRESH=8k; unset UCX_RNDV_THRES"
    assert found["UCX_QWERTZUIOP"].cure == "unset UCX_QWERTZUIOP"


def test_a_name_that_ucx_used_is_known(tmp_path: Path) -> None:
    ucx = msgspec.structs.replace(UCX, unused=("UCX_ABC",))
    environ = {"UCX_ABC": "1", "UCX_DEF": "1"}
    found = check("ucx.names", context(tmp_path, children=Children(ucx), environ=environ))
    assert [finding.subject for finding in found] == ["UCX_ABC"]


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 30))
def test_a_letter_is_missing(name: str, place: int) -> None:
    place = 4 + place % (len(name) - 4)
    wrong = name[:place] + name[place + 1 :]
    if wrong not in NAMES:
        found = dict(unknown_settings([wrong], NAMES, ("ib", "cuda")))
        # What is left may be a setting of a whole family, which is right.
        assert wrong not in found or found[wrong]
    assert unknown_settings([name], NAMES, ()) == []


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({"UCX_IB_GPU_DIRECT_RDMA": "n"}, FAIL, "turns GPUDirect RDMA off"),
        ({"UCX_MEMTYPE_CACHE": "y"}, WARN, "taken for host memory"),
        ({"UCX_MAX_RNDV_RAILS": "1"}, OK, ""),
        ({}, OK, ""),
    ],
)
def test_settings(tmp_path: Path, environ: dict[str, str], status: Status, words: str) -> None:
    node = context(tmp_path, children=Children(RDMA_UCX), machine=gpu_machine(), environ=environ)
    found = verdict("ucx.settings", node)
    assert found[0] is status
    assert words in found[1]
    plain = context(tmp_path, environ=environ)
    assert verdict("ucx.settings", plain)[0] is OK


@pytest.mark.parametrize(("index", "status"), [("auto", OK), ("3", OK), ("2", WARN), ("9", FAIL)])
def test_gid_index(tmp_path: Path, index: str, status: Status) -> None:
    gids = (Gid(2, "::ffff:10.0.0.1", "RoCE v1"), Gid(3, "::ffff:10.0.0.1", "RoCE v2"))
    roce = Port(1, "ACTIVE", "LinkUp", 100.0, "Ethernet", gids=gids)
    machine = Machine("node", nics=(Nic("mlx5_0", "mlx5_0", ports=(roce,)),))
    node = context(tmp_path, machine=machine, environ={"UCX_IB_GID_INDEX": index})
    assert verdict("ucx.settings", node)[0] is status


def test_registration_cache(tmp_path: Path) -> None:
    environ = {"UCX_RCACHE_ENABLE": "n", "UCX_MEM_EVENTS": "n"}
    node = context(tmp_path, children=Children(RDMA_UCX), machine=gpu_machine(), environ=environ)
    found = check("ucx.registration", node)
    assert [(f.status, f.subject) for f in found] == [
        (WARN, "UCX_MEM_EVENTS"),
        (WARN, "UCX_RCACHE_ENABLE"),
    ]


# -- what is there ------------------------------------------------------------------------------


def test_no_ucx(tmp_path: Path) -> None:
    ucx = UcxReport(problem="UCX's Python binding is not installed: pip install 'rdmakit[cpu]'")
    node = context(tmp_path, children=Children(ucx))
    status, _, cure = verdict("ucx.library", node)
    assert status is FAIL
    assert "pip install 'rdmakit[cpu]" in cure
    for name in ("ucx.transports", "ucx.rdma", "ucx.gpu_memory"):
        assert verdict(name, node)[0] is Status.SKIPPED


def test_a_setting_that_ucx_refuses(tmp_path: Path) -> None:
    ucx = UcxReport(problem="UCX makes no context: Invalid value for RNDV_THRESH: 'banana'")
    status, _, cure = verdict("ucx.library", context(tmp_path, children=Children(ucx)))
    assert status is FAIL
    assert "UCX_*" in cure


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("libibverbs.so.1", "libibverbs1"),
        ("librdmacm.so.1", "librdmacm1"),
        ("libmlx5.so.1", "ibverbs-providers"),
    ],
)
def test_a_library_that_is_missing(tmp_path: Path, library: str, package: str) -> None:
    error = f"{library}: cannot open shared object file: No such file or directory"
    modules = (UcxModuleReport("libuct_ib", "/x", False, error),)
    ucx = msgspec.structs.replace(UCX, modules=modules, has_ib=False)
    node = context(tmp_path, children=Children(ucx), machine=gpu_machine())
    found = check("ucx.rdma", node)
    assert found[0].status is FAIL
    assert package in found[0].cure
    # Where there is no RDMA device nothing is lost.
    assert verdict("ucx.rdma", context(tmp_path, children=Children(ucx)))[0] is OK


def test_gpu_memory(tmp_path: Path) -> None:
    good = context(tmp_path, children=Children(RDMA_UCX), machine=gpu_machine())
    assert verdict("ucx.gpu_memory", good)[0] is OK
    registers = {"host": ("mlx5_0", "mlx5_1"), "cuda": ("cuda_cpy", "mlx5_1")}
    ucx = msgspec.structs.replace(RDMA_UCX, registers=registers)
    status, found, cure = verdict(
        "ucx.gpu_memory", context(tmp_path, children=Children(ucx), machine=gpu_machine())
    )
    assert status is FAIL
    assert found.startswith("mlx5_0 register host memory only")
    assert "modprobe nvidia_peermem" in cure


_INFO = """
# Memory domain: mlx5_0
#     Component: ib
#             memory types: host (access,reg,cache)
#      Transport: rc_mlx5
#         Device: mlx5_0:1
#           Type: network
# Memory domain: cuda_cpy
#     Component: cuda_cpy
#             memory types: host (reg), cuda (access,alloc,reg)
#      Transport: cuda_copy
#         Device: cuda
"""


def test_gpu_memory_from_a_text(tmp_path: Path) -> None:
    def node(text: str) -> tuple[Status, str, str]:
        texts = read_texts({"ucx_info-d.txt": text})
        return verdict("ucx.gpu_memory", context(tmp_path, live=False, texts=texts))

    assert node(_INFO)[0] is FAIL
    assert node(_INFO.replace("(access,reg,cache)", "(reg), cuda (reg)"))[0] is OK
    assert node(_INFO.replace("memory types", "other"))[0] is Status.UNKNOWN


def test_cuda(tmp_path: Path) -> None:
    error = "libcuda.so.1: cannot open shared object file: No such file or directory"
    modules = (UcxModuleReport("libuct_cuda", "/x", False, error),)
    ucx = msgspec.structs.replace(UCX, modules=modules)
    status, found, cure = verdict(
        "ucx.cuda", context(tmp_path, children=Children(ucx), machine=gpu_machine())
    )
    assert status is FAIL
    assert "libcuda.so.1" in found
    assert "--gpus all" in cure
    plain = context(tmp_path, children=Children(ucx))
    assert verdict("ucx.cuda", plain)[0] is Status.SKIPPED


def test_two_releases(tmp_path: Path) -> None:
    ranks = (
        rank(0, facts={"ucx": "1.20.1 /a/libucp.so.0"}),
        rank(1, facts={"ucx": "1.18.0 /b/libucp.so.0"}),
    )
    status, found, _ = verdict("ucx.one", context(tmp_path, ranks=ranks, job_size=2))
    assert status is FAIL
    assert "1.18.0" in found


def test_what_ucx_says(tmp_path: Path) -> None:
    said = ("WARN transport 'foo' is not available, please use one or more of: tcp",)
    quiet = msgspec.structs.replace(UCX, said=said)
    assert verdict("ucx.log", context(tmp_path, children=Children(quiet)))[0] is OK
    said = ("ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory : Please set max locked "
            "memory (ulimit -l) to 'unlimited' (current: 64 kbytes)",)  # fmt: skip
    loud = msgspec.structs.replace(UCX, said=said)
    status, found, cure = verdict("ucx.log", context(tmp_path, children=Children(loud)))
    assert status is FAIL
    assert "64 kB" in found
    assert "ulimit -l unlimited" in cure


def test_words() -> None:
    line = "WARN network devices 'mlx5_0:1','eht0' are not available, please use one of: 'eth0'"
    assert not_available([line], "network device") == ("mlx5_0:1", "eht0")
    assert not_available([line], "transport") == ()
    assert near("eht0", ["eth0", "lo"]) == "eth0"
    assert near("xyz", ["eth0", "lo"]) == ""


def test_a_child_that_dies() -> None:
    def killed(argv: object, timeout: float) -> CommandResult:
        return CommandResult((), -11, "", "")

    assert "ended by signal 11" in ask_ucx(killed, {}).problem


def test_a_child_that_is_too_slow(tmp_path: Path) -> None:
    """Nothing is known then: that is no missing UCX, and nothing is to be installed."""

    def late(argv: object, timeout: float) -> CommandResult:
        return CommandResult((), None, "", "", "python: no end after 30 s, killed")

    status, found, cure = verdict("ucx.library", context(tmp_path, children=late))
    assert (status, cure) == (Status.UNKNOWN, "")
    assert "no end after 30 s" in found
    status, found, _ = verdict("ucx.transports", context(tmp_path, children=late))
    assert (status, found) == (Status.SKIPPED, "UCX gave no answer; ucx.library says why")
    assert verdict("mpi.library", context(tmp_path, children=late))[0] is Status.UNKNOWN
