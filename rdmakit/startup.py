"""What ranks agree on before the first call: software, settings, and what carries messages."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import rdmakit
from rdmakit.bootstrap import MpiBootstrap
from rdmakit.config import Config
from rdmakit.drivers import ucx_loading
from rdmakit.errors import RdmaKitError, SetupError, TransportError, UcxUnavailable
from rdmakit.inter.mpi import MpiChannel
from rdmakit.inter.ucx import UcxChannel
from rdmakit.protocols import Bootstrap, Channel
from rdmakit.waiting import Waiter

__all__ = ["compare_setup", "make_channel", "raise_together"]


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
    neighbours: Sequence[int],
    waiter: Waiter,
    *,
    virtual: bool,
) -> tuple[Channel, str]:
    """Make the channel between nodes, the same kind on all ranks. Collective, blocking.

    ``neighbours`` are ranks of other nodes that this one will talk to, and they to it.
    """
    problem = version = ""
    if config.ucx == "none":
        return MpiChannel.create(bootstrap), "messages go through MPI: RDMAKIT_UCX=none"
    try:
        library = ucx_loading.load(config.ucx)
        version = f"{library.version}\0{library.libraries.get('libucp', '')}"
    except UcxUnavailable as exc:
        problem = str(exc)
    if any(bootstrap.allgather(problem.encode())):
        return _or_mpi(bootstrap, config, None, problem)
    versions = [text.decode().split("\0") for text in bootstrap.allgather(version.encode())]
    if len({v for v, _ in versions}) > 1:
        first = versions[0][0]
        odd = next(rank for rank, (v, _) in enumerate(versions) if v != first)
        raise SetupError(
            f"UCX differs between ranks: rank 0 has {first} ({versions[0][1]}), rank {odd} has "
            f"{versions[odd][0]} ({versions[odd][1]})"
        )
    channel: UcxChannel | None = None
    try:
        channel = UcxChannel.create(bootstrap, config.ucx, virtual=virtual)
    except TransportError as exc:
        problem = str(exc)
    raise_together(bootstrap, problem, SetupError)
    assert channel is not None
    try:
        channel.greet(neighbours, waiter)
    except TransportError as exc:
        problem = str(exc)
    return _or_mpi(bootstrap, config, channel, problem)


def _or_mpi(
    bootstrap: MpiBootstrap, config: Config, channel: UcxChannel | None, problem: str
) -> tuple[Channel, str]:
    """Return ``channel``, or MPI's where any rank has a problem and may choose. Collective."""
    problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
    bad = [rank for rank, text in enumerate(problems) if text]
    if channel is not None and not bad:
        return channel, ""
    if channel is not None:
        channel.close()
    if config.ucx != "auto":
        raise SetupError(f"RDMAKIT_UCX={config.ucx}, rank {bad[0]}: {problems[bad[0]]}")
    return (
        MpiChannel.create(bootstrap),
        f"messages go through MPI, since UCX cannot be used on {len(bad)} of "
        f"{bootstrap.size} ranks; rank {bad[0]}: {problems[bad[0]]}",
    )
