"""Settings of Open MPI, MPICH and Intel MPI that contradict the machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.job import spread, usable_ports
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.software import software
from rdmakit.doctor.ucx_words import near

__all__ = ["CHECKS"]

_FRAMEWORK_TEXT = """
accelerator allocator async atomic backtrace base bfrops bml btl coll common compress crcp crs
cuda debugger dfs dl dpm errmgr ess event fbtl fca fcoll filem fs ft gds grpcomm hcoll hook
hwloc if installdirs io iof mca memchecker memcpy memheap memory mpi mpool mtl mxm notifier odls
ompi oob op opal orte orted osc oshmem param part patcher pcompress plm plog pmix pmix_base pml
pnet preg propagate prrte prte psec psensor psquash pstat ptl pubsub ras rcache reachable regx
rmaps rml routed rtc rte schizo scoll sec shared sharedfp shmem show smsc snapc spml sshmem
sstore state tcp threads timer topo ucx verbose vprotocol
"""
_FRAMEWORKS = frozenset((*_FRAMEWORK_TEXT.split(), "cpu", "num"))
"""Frameworks of Open MPI 4 and 5, and what else may stand first in a parameter's name; the
launcher itself sets OMPI_MCA_cpu_type and OMPI_MCA_num_procs.
"""
_VALUES = {
    "pml": ("ob1", "ucx", "cm", "monitoring", "v", "yalla", "bfo", "ucc"),
    "btl": ("self", "tcp", "sm", "vader", "openib", "uct", "ofi", "usnic", "ugni", "smcuda"),
    "mtl": ("ofi", "psm", "psm2", "psm3", "portals4", "mxm"),
}


def _settings(context: Context) -> Iterator[Finding]:
    findings = [
        *_mca_names(context),
        *_mca_values(context),
        *_pml(context),
        *_interfaces(context),
        *_fabrics(context),
    ]
    yield from findings
    if not findings:
        count = sum(name.startswith(_PREFIXES) for name in context.environ)
        yield SETTINGS.finding(Status.OK, f"none of {count} setting(s) is against the machine")


_PREFIXES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPICH_", "MPIR_CVAR_", "I_MPI_", "FI_")


def _mca_names(context: Context) -> Iterator[Finding]:
    for name in context.environ:
        if not name.startswith("OMPI_MCA_"):
            continue
        framework = name.removeprefix("OMPI_MCA_").partition("_")[0]
        if not framework.islower() or framework in _FRAMEWORKS:
            continue
        guess = near(framework, sorted(_FRAMEWORKS), 0.8)
        if guess:  # another framework may be a new one: only what looks misspelt is told
            fixed = name.replace(f"OMPI_MCA_{framework}", f"OMPI_MCA_{guess}", 1)
            yield SETTINGS.finding(
                Status.WARN,
                f"{name}: Open MPI has no framework {framework!r}; perhaps {guess} was meant",
                subject=name,
                cure=f"export {fixed}={context.environ[name]}; unset {name}",
                urgency=30,
            )


def _mca_values(context: Context) -> Iterator[Finding]:
    for framework, known in _VALUES.items():
        name = f"OMPI_MCA_{framework}"
        for part in context.environ.get(name, "").lstrip("^").split(","):
            part = part.strip()
            guess = near(part, known, 0.6) if part and part not in known else ""
            if guess:
                yield SETTINGS.finding(
                    Status.WARN,
                    f"{name}={context.environ[name]}: no component {part!r} is known; perhaps "
                    f"{guess} was meant",
                    subject=name,
                    cure=f"export {name}={context.environ[name].replace(part, guess)}",
                    urgency=25,
                )


def _pml(context: Context) -> Iterator[Finding]:
    env = context.environ
    pml = env.get("OMPI_MCA_pml", "")
    btl = env.get("OMPI_MCA_btl", "")
    names = [part.strip() for part in btl.split(",")]
    ports = usable_ports(context)
    if pml == "ob1" and ports and not set(names) & {"uct", "openib", "ofi"}:
        yield SETTINGS.finding(
            Status.WARN,
            f"OMPI_MCA_pml=ob1: MPI's own messages go over TCP, though {', '.join(ports)} would "
            "serve",
            subject="OMPI_MCA_pml",
            expected="ucx, or not set",
            cure="unset OMPI_MCA_pml",
            urgency=35,
        )
    report = software(context).mpi
    if pml == "ucx" and report is not None and report.family == "openmpi" and not report.evidence:
        yield SETTINGS.finding(
            Status.FAIL,
            f"OMPI_MCA_pml=ucx, but {report.path} has no UCX: MPI_Init fails",
            subject="OMPI_MCA_pml",
            cure="unset OMPI_MCA_pml",
            urgency=10,
        )
    if btl and not btl.startswith("^") and "self" not in names and pml in ("", "ob1"):
        yield SETTINGS.finding(
            Status.WARN,
            f"OMPI_MCA_btl={btl} has no self, which a rank needs for messages to itself",
            subject="OMPI_MCA_btl",
            cure=f"export OMPI_MCA_btl=self,{btl}",
            urgency=25,
        )
    if not btl.startswith("^") and btl and not set(names) & _FAR and pml in ("", "ob1"):
        yield SETTINGS.finding(
            Status.WARN if spread(context) is not True else Status.FAIL,
            f"OMPI_MCA_btl={btl} joins no nodes",
            subject="OMPI_MCA_btl",
            cure=f"export OMPI_MCA_btl={btl},tcp",
            urgency=15,
        )


_FAR = {"tcp", "openib", "uct", "ofi", "usnic", "ugni"}


def _interfaces(context: Context) -> Iterator[Finding]:
    """Settings that name network interfaces."""
    interfaces = software(context).interfaces
    if not interfaces:
        return
    names = [one.name for one in interfaces]
    for variable, value in context.environ.items():
        if (
            not re.search(
                r"_MCA_(btl_tcp|oob_tcp|prte|if|pmix_ptl_tcp|ptl_tcp)\w*_if_include$", variable
            )
            and variable not in _ONE_INTERFACE
        ):
            continue
        wanted = [part.strip() for part in value.split(",") if part.strip()]
        hit = [part for part in wanted if _names_one(part, context)]
        missing = [part for part in wanted if part not in hit]
        if not missing:
            continue
        guess = near(missing[0], names, 0.6)
        yield SETTINGS.finding(
            Status.WARN if hit else Status.FAIL,
            f"{variable}={value}: {', '.join(missing)} names no interface of this node that is up"
            + (f" (perhaps {guess})" if guess and guess != missing[0] else ""),
            subject=variable,
            expected=f"of {', '.join(one.describe() for one in interfaces if one.up)}",
            cure=f"export {variable}={','.join(hit)}" if hit else f"unset {variable}",
            urgency=12,
        )


_ONE_INTERFACE = ("HYDRA_IFACE", "I_MPI_HYDRA_IFACE", "MPICH_NETWORK_IFACE", "FI_TCP_IFACE")


def _names_one(part: str, context: Context) -> bool:
    up = [one for one in software(context).interfaces if one.up]
    if any(one.name == part for one in up):
        return True
    try:
        network = ipaddress.ip_network(part, strict=False)
    except ValueError:
        return False
    return any(one.address and ipaddress.ip_address(one.address) in network for one in up)


def _fabrics(context: Context) -> Iterator[Finding]:
    env = context.environ
    ports = usable_ports(context)
    fabrics = env.get("I_MPI_FABRICS", "")
    if fabrics == "shm":
        yield SETTINGS.finding(
            Status.FAIL if spread(context) else Status.WARN,
            "I_MPI_FABRICS=shm joins no nodes",
            subject="I_MPI_FABRICS",
            expected="shm:ofi",
            cure="unset I_MPI_FABRICS",
            urgency=15,
        )
    provider = env.get("FI_PROVIDER", "")
    if provider in ("tcp", "sockets", "udp") and ports:
        yield SETTINGS.finding(
            Status.WARN,
            f"FI_PROVIDER={provider}: MPI's own messages go over TCP, though {', '.join(ports)} "
            "would serve",
            subject="FI_PROVIDER",
            expected="verbs or mlx",
            cure="unset FI_PROVIDER",
            urgency=35,
        )


SETTINGS = Check(
    "mpi.settings",
    "MPI settings against the machine",
    "A setting of another cluster sends MPI's messages the slow way, or nowhere.",
    _settings,
    seconds=60,
)

CHECKS = (SETTINGS,)
