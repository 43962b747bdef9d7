"""prove_path on ranks that are threads, with fake machines, children and registrations."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rdmakit.communicator import Communicator
from rdmakit.drivers.host import HostTree
from rdmakit.errors import (
    CollectiveMismatch,
    CommunicatorClosed,
    InvalidArgument,
    SetupError,
    UnsupportedError,
)
from rdmakit.memory import MemoryChannel
from rdmakit.proof import PathReport, prove_path
from rdmakit.proof.children import Setting, child_environment, variants_for
from rdmakit.proof.evidence import ChildResult, Hello, Order, Registration
from rdmakit.proof.prove import Doors
from tests.conformance.ranks import with_comm

NBYTES = 1 << 20


class Machine:
    """A fake tree whose port counts what its rank's channel sends and receives."""

    def __init__(self, root: Path, name: str, port: str) -> None:
        self.port, self.sent, self.received = port, 0, 0
        self.root = root / name
        (self.root / "proc/self/ns").mkdir(parents=True)
        (self.root / "proc/self/ns/net").symlink_to(f"net:[{name}]")
        boot = self.root / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text(name)
        self.tree = HostTree(self.root)
        self.write()

    def count(self, sent: int, received: int) -> None:
        self.sent, self.received = self.sent + sent, self.received + received
        self.write()

    def write(self) -> None:
        if self.port.endswith(":1"):
            folder = self.root / f"sys/class/infiniband/{self.port[:-2]}/ports/1/counters"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "port_xmit_data").write_text(f"{self.sent // 4}\n")
            (folder / "port_rcv_data").write_text(f"{self.received // 4}\n")
        net = f"eth0: {self.received} 0 0 0 0 0 0 0 {self.sent} 0 0 0 0 0 0 0\n"
        (self.root / "proc/net").mkdir(exist_ok=True)
        (self.root / "proc/net/dev").write_text(net if self.port == "eth0" else "")


class Counted:
    """A channel in memory that is counted by a machine, and calls itself UCX's."""

    name = "counted"

    def __init__(self, channel: MemoryChannel, machine: Machine, lane: str) -> None:
        self._channel, self._machine, self._lane = channel, machine, lane
        self.net_devices: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, peer: int, handle: Any, tag: int) -> Any:
        self._machine.count(int(handle.nbytes * 1.02), 0)
        return self._channel.send(peer, handle, tag)

    def recv(self, peer: int, handle: Any, tag: int) -> Any:
        self._machine.count(0, int(handle.nbytes * 1.02))
        return self._channel.recv(peer, handle, tag)

    def transports(self, peer: int) -> Any:
        return ((self._lane, self._machine.port),)


def run(tmp_path: Path, sizes: list[int], lane: str, port: str, **given: Any) -> list[PathReport]:
    machines = {n: Machine(tmp_path, f"machine{n}", port) for n in range(len(sizes))}
    plain = given.pop("doors", Doors())

    def body(comm: Communicator) -> PathReport:
        machine = machines[comm.layout.node_of(comm.rank)]
        if comm.channel is not None:
            comm.channel = Counted(comm.channel, machine, lane)  # type: ignore[arg-type]
            comm._job.why_staged = ""
        doors = replace(plain, tree=machine.tree, sleep=lambda _: None)
        return prove_path(comm, doors=doors, **{"nbytes": NBYTES, "thorough": False, **given})

    return with_comm(sizes, body)


@pytest.mark.parametrize(
    ("lane", "port", "want"), [("tcp", "eth0", "tcp"), ("rc_mlx5", "mlx5_0:1", "rdma-host")]
)
@pytest.mark.parametrize("sizes", [[1, 1], [2, 1], [1, 2, 1]], ids=str)
def test_between_nodes(tmp_path: Path, sizes: list[int], lane: str, port: str, want: str) -> None:
    reports = run(tmp_path, sizes, lane, port)
    assert all(report == reports[0] for report in reports)
    assert len(reports[0].pairs) == len(sizes) * (len(sizes) - 1) // 2
    for proof in reports[0].pairs:
        assert proof.verdict.path == want, proof.verdict
        assert proof.evidence.wrong == 0
        assert proof.evidence.sent == proof.evidence.messages * NBYTES
        assert proof.evidence.channel == "counted"


def test_lanes_that_lie(tmp_path: Path) -> None:
    reports = run(tmp_path, [1, 1], "rc_mlx5", "eth0")
    (proof,) = reports[0].pairs
    assert proof.verdict.path == "unproven"
    assert "no counters" not in " ".join(proof.verdict.disagreements)


def test_inside_a_node_needs_shared_memory(tmp_path: Path) -> None:
    reports = run(tmp_path, [2], "tcp", "eth0", inside=True)
    (proof,) = reports[0].pairs
    # Threads have no window over a file: nothing shows that it is one memory.
    assert proof.evidence.inside
    assert proof.verdict.path == "unproven"
    assert proof.evidence.wrong == 0
    assert "memory window" in " ".join(proof.verdict.missing)


def test_given_pairs_keep_their_order(tmp_path: Path) -> None:
    pairs = [(2, 0), (0, 1), (1, 2)]
    reports = run(tmp_path, [1, 1, 1], "tcp", "eth0", pairs=pairs)
    assert [(p.first, p.second) for p in reports[0].pairs] == pairs
    assert {p.verdict.path for p in reports[0].pairs} == {"tcp"}


@pytest.mark.parametrize(
    "given",
    [{"pairs": [(0, 0)]}, {"pairs": [(0, 9)]}, {"pairs": [(0, 1), (0, 1)]}, {"nbytes": 8},
     {"memory": "tape"}],
    ids=str,
)  # fmt: skip
def test_arguments(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        run(tmp_path, [1, 1], "tcp", "eth0", **given)


@pytest.mark.parametrize(
    "wrong", [{"memory": "tape"}, {"nbytes": "4M"}, {"nbytes": 8}, {"pairs": [1]}], ids=str
)
def test_wrong_arguments_of_one_rank_are_told_on_all(wrong: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        given: dict[str, Any] = {"nbytes": NBYTES, "thorough": False}
        with pytest.raises(InvalidArgument, match="rank 1: "):
            prove_path(comm, **(given | wrong if comm.rank == 1 else given))

    with_comm([1, 1], body)


def test_different_arguments() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match="other arguments"):
            prove_path(comm, nbytes=NBYTES + comm.rank, thorough=False)

    with_comm([1, 1], body)


def test_no_gpu(tmp_path: Path) -> None:
    class NoGpu:
        @staticmethod
        def why_not() -> str:
            return "no NVIDIA driver"

    with pytest.raises(UnsupportedError, match="no NVIDIA driver"):
        run(tmp_path, [1, 1], "tcp", "eth0", memory="gpu", doors=Doors(cuda=NoGpu))


def test_a_failure_is_evidence_and_the_rest_is_not_tried(tmp_path: Path) -> None:
    class NoRoom(Counted):
        def send(self, peer: int, handle: Any, tag: int) -> Any:
            if peer == 1:
                raise SetupError("cut")
            return super().send(peer, handle, tag)

    machines = [Machine(tmp_path, f"machine{n}", "eth0") for n in range(3)]

    def body(comm: Communicator) -> PathReport:
        comm.channel = NoRoom(comm.channel, machines[comm.rank], "tcp")  # type: ignore[arg-type]
        comm.waiter.timeout = 0.3
        doors = Doors(tree=machines[comm.rank].tree, sleep=lambda _: None)
        report = prove_path(comm, [(0, 1), (0, 2)], nbytes=NBYTES, thorough=False, doors=doors)
        with pytest.raises(CommunicatorClosed, match="proof of path: rank 1: TransferTimeout"):
            comm.Barrier()
        return report

    reports = with_comm([1, 1, 1], body)
    assert reports[0] == reports[1] == reports[2]
    first, second = reports[0].pairs
    assert first.verdict.path == second.verdict.path == "unproven"
    assert "rank 0: SetupError: cut" in first.evidence.problems
    assert second.evidence.problems[0].startswith("not tried after: rank 1: TransferTimeout")


# -- children ---------------------------------------------------------------------------------

DIRECT = """
+---------+-----------------------------------------------------------+
| x cfg#1 | tagged message by ucp_tag_send*(multi) from cuda/GPU0     |
+---------+-------------------------------------+---------------------+
|  0..inf | rendezvous zero-copy read from remote | rc_mlx5/mlx5_0:1  |
+---------+-------------------------------------+---------------------+
"""


class FakeEnd:
    """A child that never started a process."""

    made: list[tuple[int, str]] = []  # noqa: RUF012 - of the whole test
    lock = threading.Lock()

    def __init__(self, order: Order, setting: Setting) -> None:
        with self.lock:
            self.made.append((order.role, setting.name))
        self._order, self._setting = order, setting

    def hello(self) -> Hello:
        if self._setting.name == "dmabuf-off" and self._order.role:
            raise SetupError("the child has ended: no dma-buf")
        return Hello(f"{self._order.role:02x}", "1.20.1", "/ucx/libucp.so.0")

    def run(self, address: str) -> ChildResult:
        assert address == f"{1 - self._order.role:02x}"
        return ChildResult(0.001, self._order.messages, (("rc_mlx5", "mlx5_0:1"),))

    def end(self) -> str:
        text = DIRECT
        if self._setting.name == "gdr-off":
            text = text.replace("zero-copy read from remote", "cuda_copy, frag host      ")
        return text.replace("cuda/GPU0", "host     ") if self._setting.memory == "host" else text


def gpu_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, takes: bool) -> list[PathReport]:
    from rdmakit.drivers import ucx_loading
    from tests.conformance.fake_gpu import Door

    class Library:
        libraries = {"libucp": "/ucx/libucp.so.0"}  # noqa: RUF012

    monkeypatch.setattr(ucx_loading, "loaded", Library)
    monkeypatch.setattr(Counted, "name", "ucx")
    monkeypatch.setattr(
        Counted, "wrap_device", lambda self, a, n: self._channel.wrap(bytes_at(a, n)), raising=False
    )
    from rdmakit.buffer import bytes_at

    class Cuda(Door):
        def copy_now(self, dst: int, src: int, nbytes: int) -> None:
            bytes_at(dst, nbytes)[:] = bytes_at(src, nbytes)

        def __init__(self) -> None:
            super().__init__()
            plain = self.DeviceMemory
            self.DeviceMemory = lambda nbytes, zero=False: plain(nbytes)

    def register(
        rank: int, side: str, ports: tuple[str, ...], memory: str, address: int, nbytes: int
    ) -> Registration:
        assert (ports, memory, nbytes) == (("mlx5_0:1",), "gpu", NBYTES)
        assert address
        return Registration(
            rank=rank, side=side, device="mlx5_0", peermem=False, dmabuf=takes or side == "sender"
        )

    FakeEnd.made.clear()
    doors = Doors(child=FakeEnd, register=register, cuda=Cuda())
    return run(tmp_path, [1, 1], "rc_mlx5", "mlx5_0:1", memory="gpu", thorough=True, doors=doors)


def test_gpu_direct_on_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reports = gpu_run(monkeypatch, tmp_path, takes=True)
    assert reports[0] == reports[1]
    (proof,) = reports[0].pairs
    assert proof.verdict.path == "gdr-dmabuf", proof.verdict
    variants = {v.name: v for v in proof.evidence.variants}
    assert list(variants) == ["default", "gdr-off", "dmabuf-off", "host"]
    assert variants["default"].GBps == pytest.approx(8 * NBYTES / 0.001 / 1e9, rel=1e-3)
    assert variants["gdr-off"].setting == "UCX_IB_GPU_DIRECT_RDMA=n"
    assert variants["dmabuf-off"].problem == "receiver: the child has ended: no dma-buf"
    assert sorted(FakeEnd.made) == sorted((r, name) for r in (0, 1) for name in variants)


def test_one_nic_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (proof,) = gpu_run(monkeypatch, tmp_path, takes=False)[0].pairs
    assert proof.verdict.path == "unproven"
    assert "UCX's table says zero-copy, but (d) receiver" in proof.verdict.disagreements[0]


def test_variants_and_their_environment() -> None:
    assert [s.name for s in variants_for("host", staged=False)] == ["default"]
    assert [s.name for s in variants_for("gpu", staged=True)] == ["host"]
    off = next(s for s in variants_for("gpu", staged=False) if s.name == "dmabuf-off")
    mine = {"PATH": "/bin", "UCX_TLS": "rc", "UCX_LOG_FILE": "/tmp/x", "PMIX_RANK": "0",
            "OMPI_COMM_WORLD_RANK": "0"}  # fmt: skip
    assert child_environment(off, mine) == {
        "PATH": "/bin",
        "UCX_TLS": "rc",
        "UCX_PROTO_INFO": "y",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_CUDA_COPY_DMABUF": "n",
    }
