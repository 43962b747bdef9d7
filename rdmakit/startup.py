"""What ranks agree on before the first call: software, settings, and what carries messages."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence

import msgspec

import rdmakit
from rdmakit.bootstrap import MpiBootstrap
from rdmakit.config import Config
from rdmakit.drivers import cuda, ucx_loading
from rdmakit.drivers.host import HostTree
from rdmakit.errors import RdmaKitError, SetupError, TransportError
from rdmakit.inter.mpi import MpiChannel
from rdmakit.inter.ucx import UcxChannel
from rdmakit.protocols import Bootstrap, Channel
from rdmakit.waiting import Waiter

__all__ = [
    "agree_on_direct",
    "compare_setup",
    "make_channel",
    "one_node_notes",
    "raise_together",
]


def raise_together(bootstrap: Bootstrap, problem: str, kind: type[RdmaKitError]) -> None:
    """Raise ``kind`` on every rank when any has a problem. Collective, blocking."""
    problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
    bad = [rank for rank, text in enumerate(problems) if text]
    if bad:
        more = f" (and {len(bad) - 1} more ranks)" if len(bad) > 1 else ""
        raise kind(f"rank {bad[0]}{more}: {problems[bad[0]]}")


def compare_setup(bootstrap: Bootstrap, config: Config) -> None:
    """See that all ranks run the same software with the same settings. Collective, blocking.

    Raises:
        SetupError: on every rank; names the odd ranks and what differs.
    """
    from mpi4py import __version__ as mpi4py_version

    mpi = MpiBootstrap.describe() if isinstance(bootstrap, MpiBootstrap) else {}
    facts = {
        "rdmakit": rdmakit.__version__,
        "Python": platform.python_version(),
        "mpi4py": mpi4py_version,
        "MPI library": str(mpi.get("library", "")),
        "RDMAKIT_* settings": config.describe(),
    }
    told = [
        dict(zip(facts, text.decode().split("\0"), strict=True))
        for text in bootstrap.allgather("\0".join(facts.values()).encode())
    ]
    differences = []
    for name in facts:
        values = [entry[name] for entry in told]
        usual = max(values, key=values.count)  # of equals the first, on every rank
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            differences.append(
                f"{name}: {usual!r}, but {values[odd[0]]!r} on rank(s) {odd[:8]}"
                + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
            )
    if differences:
        raise SetupError("the ranks do not run the same software: " + "; ".join(differences))


def make_channel(
    bootstrap: MpiBootstrap,
    config: Config,
    partners: Sequence[int],
    waiter: Waiter,
    *,
    virtual: bool,
    devices: Sequence[str] = (),
) -> tuple[Channel, str]:
    """Make the channel between nodes, the same kind on all ranks. Collective, blocking.

    Args:
        bootstrap: control plane of the job.
        config: ``ucx`` says which UCX, or none.
        partners: ranks of other nodes that this one talks to first, and they to it.
        waiter: for the first words.
        virtual: nodes are parts of one host.
        devices: network devices of each rank; equal on all ranks. If the ranks do not reach each
            other with them, UCX gets all devices.

    Returns:
        The channel, and why it is not UCX's, or not on these devices.

    Raises:
        SetupError: on every rank: UCX was asked for by name and cannot serve, or differs.
    """
    if config.ucx == "none":
        return MpiChannel.create(bootstrap), "messages go through MPI: RDMAKIT_UCX=none"
    offer = {"problem": "", "version": "", "path": "", "address": ""}
    channel: UcxChannel | None = None
    try:
        library = ucx_loading.load(config.ucx)
        offer |= {"version": library.version, "path": library.libraries.get("libucp", "")}
        own = devices[bootstrap.rank] if devices else ""
        channel = UcxChannel.open(bootstrap.rank, config.ucx, virtual=virtual, devices=own)
        channel.net_devices = tuple(devices)
        offer["address"] = channel.address.hex()
    except (SetupError, TransportError) as exc:
        offer["problem"] = str(exc)
    offers = [msgspec.json.decode(x) for x in bootstrap.allgather(msgspec.json.encode(offer))]
    problems = [entry["problem"] for entry in offers]
    if devices and any(problems):
        return _all_devices(bootstrap, config, partners, waiter, channel, problems, virtual=virtual)
    if channel is None or any(problems):
        return _mpi_instead(bootstrap, config, channel, problems)
    odd = [r for r, entry in enumerate(offers) if entry["version"] != offers[0]["version"]]
    if odd:
        raise SetupError(
            "UCX differs between ranks: "
            + ", ".join(
                f"rank {rank} has {offers[rank]['version']} ({offers[rank]['path']})"
                for rank in (0, odd[0])
            )
        )
    problem = ""
    try:
        channel.connect([bytes.fromhex(entry["address"]) for entry in offers])
        channel.greet(partners, waiter)
    except TransportError as exc:
        problem = str(exc)
    # A word may still be on its way out of this process: move it while the others are awaited.
    bootstrap.meanwhile = channel.progress
    problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
    if any(problems):
        bootstrap.meanwhile = None
        if devices:
            return _all_devices(
                bootstrap, config, partners, waiter, channel, problems, virtual=virtual
            )
        return _mpi_instead(bootstrap, config, channel, problems)
    return channel, ""


def agree_on_direct(
    bootstrap: Bootstrap, config: Config, channel: Channel, partners: Sequence[int]
) -> str:
    """Return why messages take no GPU memory as it is, or nothing. Collective, blocking.

    Looks for a GPU only where an RDMA device could read it, or by ``gpu_direct="on"``: asking for
    one costs a tenth of a second. Whether a NIC really reads it is another question.

    Raises:
        SetupError: on every rank: it is on, and some rank cannot.
    """
    if config.gpu_direct == "off":
        return "gpu_direct=off"
    why = channel.why_no_device if isinstance(channel, UcxChannel) else f"{channel.name} channel"
    if not why and config.gpu_direct == "auto":
        lanes = [lane for peer in partners for lane in channel.transports(peer)]
        why = why_not_rdma(lanes, HostTree())
    why = why or cuda.why_not()
    reasons = [text.decode() for text in bootstrap.allgather(why.encode())]
    bad = [rank for rank, text in enumerate(reasons) if text]
    if bad and config.gpu_direct == "on":
        raise SetupError(f"RDMAKIT_GPU_DIRECT=on, rank {bad[0]}: {reasons[bad[0]]}")
    return f"rank {bad[0]}: {reasons[bad[0]]}" if bad else ""


def one_node_notes(config: Config) -> list[str]:
    """Return what a person should know where all ranks are on one node. Pure."""
    if config.gpu_direct != "on":
        return []
    return [
        "gpu_direct=on: all ranks are on one node, so no bytes go between nodes, and there is "
        "nothing to use it for or to prove"
    ]


def why_not_rdma(lanes: Sequence[tuple[str, str]], tree: HostTree) -> str:
    """Return why no NIC on these lanes can read GPU memory here, or nothing. Local.

    Args:
        lanes: (transport, device) of the connections, as UCX names them.
        tree: the machine.
    """
    rdma = [name for name, _ in lanes if name.startswith(("rc_", "dc_", "ud_", "gga_"))]
    if not rdma:
        names = sorted({"/".join(lane) for lane in lanes})
        return f"no RDMA transport between the nodes, only {', '.join(names) or 'none'}"
    modules = ("nvidia_peermem", "nv_peer_mem")
    if any(tree.exists(f"/sys/module/{name}") for name in modules):
        return ""
    release = tuple(int(n) for n in re.findall(r"\d+", tree.read_text(_RELEASE) or "")[:2])
    open_module = "Open Kernel Module" in (tree.read_text("/proc/driver/nvidia/version") or "")
    if release >= (5, 12) and open_module:  # dma-buf, which needs the open kernel module
        return ""
    return (
        f"{rdma[0]} is there, but nothing lets the NIC read GPU memory: neither nvidia_peermem is "
        "loaded (modprobe nvidia-peermem) nor dma-buf offered (Linux 5.12 or newer and NVIDIA's "
        "open kernel module)"
    )


_RELEASE = "/proc/sys/kernel/osrelease"


def _all_devices(
    bootstrap: MpiBootstrap,
    config: Config,
    partners: Sequence[int],
    waiter: Waiter,
    channel: UcxChannel | None,
    problems: Sequence[str],
    *,
    virtual: bool,
) -> tuple[Channel, str]:
    """Leave the network devices to UCX, on every rank. Collective, blocking."""
    if channel is not None:
        channel.close()
    bad = next(rank for rank, text in enumerate(problems) if text)
    other, note = make_channel(bootstrap, config, partners, waiter, virtual=virtual)
    text = f"these network devices did not serve, UCX chooses; rank {bad}: {problems[bad]}"
    return other, "; ".join(filter(None, (text, note)))


def _mpi_instead(
    bootstrap: MpiBootstrap, config: Config, channel: UcxChannel | None, problems: Sequence[str]
) -> tuple[Channel, str]:
    """Give UCX up on every rank, where the user left the choice. Collective, blocking."""
    if channel is not None:
        channel.close()
    bad = [rank for rank, text in enumerate(problems) if text]
    if config.ucx != "auto":
        raise SetupError(f"RDMAKIT_UCX={config.ucx}, rank {bad[0]}: {problems[bad[0]]}")
    return (
        MpiChannel.create(bootstrap),
        f"messages go through MPI, since UCX cannot be used on {len(bad)} of "
        f"{bootstrap.size} ranks; rank {bad[0]}: {problems[bad[0]]}",
    )
