"""State of the GPUs: MIG, memory errors, Xid, BAR1, clocks, persistence, NVSwitch fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import kernel_log, query
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.topology.parsers.kernel_log import Xid
from rdmakit.topology.parsers.smi_query import SmiGpu

__all__ = ["CHECKS"]

_NO_ANSWER = "nvidia-smi -q did not answer, or its output is not among the files"
_FATAL_XIDS = (48, 62, 64, 74, 79, 95, 119, 120, 140, 143)
"""The GPU or an NVLink is broken or stopped (NVIDIA, 'XID Errors')."""
_PROGRAMS_XIDS = (13, 31, 43, 45, 68, 69)
"""A program's own fault, as a rule: an exception, an address that is not its own, its clean-up."""
_PROGRAM_FIRST_XIDS = (8, 32, 109)
"""Work that did not end in time, or was not understood: of a program or the driver, seldom of the
hardware (8: stopped processing; 32: corrupted commands; 109: context switch timeout)."""


def _each(context: Context) -> Iterator[tuple[str, SmiGpu]]:
    """Yield what nvidia-smi tells of each GPU, with its label here."""
    labels = {gpu.pci: gpu.label for gpu in context.machine.gpus}
    for index, gpu in enumerate(query(context).gpus):
        yield labels.get(gpu.pci) or f"GPU{index}", gpu


def _mig(context: Context) -> Iterator[Finding]:
    on = [gpu.label for gpu in context.machine.gpus if gpu.mig_mode]
    known = [gpu for gpu in context.machine.gpus if gpu.mig_mode is not None]
    if not on:
        told = {label: gpu.value(r"MIG Mode/Current") for label, gpu in _each(context)}
        on = [label for label, mode in told.items() if mode == "Enabled"]
        if not known and not told:
            yield MIG.finding(Status.UNKNOWN, _NO_ANSWER)
            return
    if on:
        yield MIG.finding(
            Status.WARN,
            f"on: {', '.join(on)}",
            expected="off",
            cure=f"nvidia-smi -i {','.join(label.removeprefix('GPU') for label in on)} -mig 0",
            urgency=45,
        )
    else:
        yield MIG.finding(Status.OK, "off")


def _ecc_of(label: str, gpu: SmiGpu) -> Finding | None:
    lost = gpu.counts(r"ECC Errors/Volatile/(.*Uncorrectable.*|Double Bit/.*)")
    failed = gpu.value(r"Remapped Rows/Remapping Failure Occurred") == "Yes"
    pending = (gpu.value(r"Remapped Rows/Pending") or "").startswith("Yes") or (
        gpu.value(r"Retired Pages/Pending( Page Blacklist)?") == "Yes"
    )
    number = label.removeprefix("GPU")
    if failed or lost:
        counts = ", ".join(f"{name} {n}" for name, n in lost.items())
        text = "rows could not be remapped: the GPU must be replaced" if failed else counts
        return ECC.finding(
            Status.FAIL,
            f"{text} since the driver was loaded" if not failed else text,
            subject=label,
            expected="no uncorrectable memory errors",
            cure=f"drain the node, nvidia-smi --gpu-reset -i {number}; if they come back, have "
            f"the GPU replaced (nvidia-smi -q -d ECC,ROW_REMAPPER -i {number})",
            urgency=8,
        )
    if pending:
        return ECC.finding(
            Status.WARN,
            "bad memory waits to be taken out of use at the next reset",
            subject=label,
            expected="nothing pending",
            cure=f"drain the node and nvidia-smi --gpu-reset -i {number}, or reboot",
            urgency=28,
        )
    return None


def _each_or_ok(
    context: Context,
    check: Callable[[], Check],
    judge: Callable[[str, SmiGpu], Finding | None],
    good: str,
) -> Iterator[Finding]:
    """Yield what ``judge`` finds of each GPU; ``good`` where it finds nothing."""
    every = list(_each(context))
    if not every:
        yield check().finding(Status.UNKNOWN, query(context).problem or _NO_ANSWER)
        return
    found = [finding for label, gpu in every if (finding := judge(label, gpu)) is not None]
    yield from found or [check().finding(Status.OK, good)]


def _ecc(context: Context) -> Iterator[Finding]:
    yield from _each_or_ok(context, lambda: ECC, _ecc_of, "no uncorrectable memory errors")


def _xid(context: Context) -> Iterator[Finding]:
    log = kernel_log(context)
    if not context.machine.gpus and not log.xids:
        yield XID.finding(Status.SKIPPED, "no NVIDIA GPU is visible here")
        return
    if not log.known:
        yield XID.finding(Status.UNKNOWN, "the kernel's log cannot be read: dmesg as root tells")
        return
    grave = [xid for xid in log.xids if xid.number not in _PROGRAMS_XIDS]
    labels = {gpu.pci: gpu.label for gpu in context.machine.gpus}
    for pci in dict.fromkeys(xid.pci for xid in grave):
        own = [xid for xid in grave if xid.pci == pci]
        hard = [xid for xid in own if xid.number not in _PROGRAM_FIRST_XIDS]
        if not hard:
            yield _program_first(own, labels.get(pci, pci))
            continue
        worst = next((xid for xid in hard if xid.number in _FATAL_XIDS), hard[-1])
        fatal = worst.number in _FATAL_XIDS
        yield XID.finding(
            Status.FAIL if fatal else Status.WARN,
            f"Xid {worst.number}: {worst.text[:120] or 'no text'}"
            + (f" (and {len(own) - 1} more)" if len(own) > 1 else ""),
            subject=labels.get(pci, pci),
            expected="no Xid since boot",
            cure=f"drain the node and reboot (or nvidia-smi --gpu-reset -i {pci}); if it comes "
            "back, have the GPU or its NVLink looked at",
            urgency=7 if fatal else 27,
        )
    if not grave:
        own = [xid for xid in log.xids if xid.number in _PROGRAMS_XIDS]
        told = f"only programs' own faults: {_of_process(own[-1])}" if own else "no Xid in the log"
        yield XID.finding(Status.OK, told)


def _of_process(xid: Xid) -> str:
    return f"Xid {xid.number}" + (f" of {xid.process}" if xid.process else "")


def _program_first(xids: Sequence[Xid], subject: str) -> Finding:
    """Tell of Xids of one GPU that speak of a program sooner than of the hardware."""
    last = xids[-1]
    programs = list(dict.fromkeys(xid.process for xid in xids if xid.process))
    whose = ", ".join(programs[-3:]) if programs else "the program that ran then"
    return XID.finding(
        Status.WARN,
        f"{_of_process(last)}: {last.text[:120] or 'no text'}"
        + (f" (and {len(xids) - 1} more)" if len(xids) > 1 else ""),
        subject=subject,
        expected="no Xid since boot",
        cure=f"look at {whose} first: a kernel that runs or waits for very long, or a fault of "
        "its own; then at the driver's release. Only if it comes back with other programs: drain "
        f"the node and nvidia-smi --gpu-reset -i {last.pci}",
        urgency=60,
    )


def _bar1_of(label: str, gpu: SmiGpu) -> Finding | None:
    total, used = (gpu.mebibytes(rf"BAR1 Memory Usage/{n}") for n in ("Total", "Used"))
    memory = gpu.mebibytes(r"FB Memory Usage/Total")
    if not total:
        return None
    if used is not None and used > 0.95 * total:
        return BAR1.finding(
            Status.WARN,
            f"{used} of {total} MiB are used",
            subject=label,
            expected="room to register buffers",
            cure="end other processes that registered GPU memory (nvidia-smi -q -d PIDS), or "
            "register smaller buffers",
            urgency=38,
        )
    if memory and total < memory / 2:
        return BAR1.finding(
            Status.WARN,
            f"{total} MiB for {memory} MiB of memory",
            subject=label,
            expected="as much as the GPU has memory",
            cure="switch on 'Above 4G decoding' and 'Resizable BAR' in the BIOS (nvidia-smi -q "
            "-d MEMORY shows BAR1); workstation GPUs: displaymodeselector",
            urgency=70,
        )
    return None


def _bar1(context: Context) -> Iterator[Finding]:
    if not context.machine.nics:
        yield BAR1.finding(Status.SKIPPED, "no RDMA device that would register GPU memory")
        return
    sizes = {gpu.value(r"BAR1 Memory Usage/Total") or "?" for _, gpu in _each(context)}
    yield from _each_or_ok(context, lambda: BAR1, _bar1_of, f"{', '.join(sorted(sizes))} each")


def _persistence(context: Context) -> Iterator[Finding]:
    off = [label for label, gpu in _each(context) if gpu.value("Persistence Mode") == "Disabled"]
    if not query(context).gpus:
        yield PERSISTENCE.finding(Status.UNKNOWN, query(context).problem or _NO_ANSWER)
    elif off and not context.machine.virtual:
        yield PERSISTENCE.finding(
            Status.WARN,
            f"off: {', '.join(off)}",
            expected="on",
            cure="systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1",
            urgency=85,
        )
    else:
        yield PERSISTENCE.finding(Status.OK, "off in a virtual machine" if off else "on")


def _compute_of(label: str, gpu: SmiGpu) -> Finding | None:
    mode = gpu.value("Compute Mode")
    if mode is None or mode == "Default":
        return None
    closed = mode == "Prohibited"
    return COMPUTE.finding(
        Status.FAIL if closed else Status.WARN,
        f"{mode}: " + ("no program may use it" if closed else "one process at a time"),
        subject=label,
        expected="Default",
        cure=f"nvidia-smi -i {label.removeprefix('GPU')} -c DEFAULT",
        urgency=9 if closed else 46,
    )


def _compute(context: Context) -> Iterator[Finding]:
    yield from _each_or_ok(context, lambda: COMPUTE, _compute_of, "Default")


def _clocks_of(label: str, gpu: SmiGpu) -> Finding | None:
    slow = [
        path.rpartition("/")[2]
        for path, value in gpu.all(
            r"Clocks (Event|Throttle) Reasons/(.*/)?(HW Slowdown|HW Thermal Slowdown|"
            r"HW Power Brake Slowdown|SW Thermal Slowdown)"
        )
        if value == "Active"
    ]
    if not slow:
        return None
    return CLOCKS.finding(
        Status.WARN,
        f"slowed down now: {', '.join(slow)}",
        subject=label,
        expected="no slowdown by heat or power",
        cure=f"nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE -i {label.removeprefix('GPU')}; "
        "check fans, inlets and power supplies",
        urgency=26,
    )


def _clocks(context: Context) -> Iterator[Finding]:
    yield from _each_or_ok(context, lambda: CLOCKS, _clocks_of, "not slowed down")


def _fabric_of(label: str, gpu: SmiGpu) -> Finding | None:
    state, status = gpu.value("Fabric/State"), gpu.value("Fabric/Status")
    if state is None or (state == "Completed" and status in (None, "Success")):
        return None
    return FABRIC.finding(
        Status.FAIL,
        f"state {state}" + (f", status {status}" if status else ""),
        subject=label,
        expected="Completed, Success",
        cure="systemctl enable --now nvidia-fabricmanager (of the driver's own version; "
        "journalctl -u nvidia-fabricmanager says why it stopped)",
        urgency=7,
    )


def _fabric(context: Context) -> Iterator[Finding]:
    yield from _each_or_ok(
        context, lambda: FABRIC, _fabric_of, "complete, or this machine has no NVSwitch"
    )


def _made(name: str, title: str, why: str, run: Callable[[Context], Iterator[Finding]]) -> Check:
    return Check(f"gpu.{name}", title, why, run, needs=("gpu",))


MIG = _made(
    "mig",
    "MIG mode",
    "Parts of a GPU have no NVLink, P2P or CUDA IPC between them; bandwidths cannot be compared.",
    _mig,
)
ECC = _made("ecc", "Memory errors", "A GPU with bad memory ends jobs at random.", _ecc)
XID = Check(  # without need of a GPU: the one that fell off the bus is not visible any more
    "gpu.xid",
    "Xid in the kernel's log",
    "The driver's own word for what went wrong with a GPU or an NVLink.",
    _xid,
)
BAR1 = _made(
    "bar1",
    "BAR1",
    "A NIC reaches GPU memory through this window: what does not fit cannot be registered.",
    _bar1,
)
PERSISTENCE = _made(
    "persistence",
    "Persistence mode",
    "Without it the driver starts the GPU anew for each process: seconds at every start.",
    _persistence,
)
COMPUTE = _made(
    "compute_mode",
    "Compute mode",
    "In an exclusive mode a second process on the GPU fails: MPI helpers, benchmarks, MPS.",
    _compute,
)
CLOCKS = _made(
    "clocks",
    "Slowdown by heat or power",
    "A GPU that protects itself makes every rank of the job wait for it.",
    _clocks,
)
FABRIC = _made(
    "fabric",
    "NVSwitch fabric",
    "With NVSwitches CUDA does not start before the fabric manager has set them up.",
    _fabric,
)

CHECKS = (MIG, ECC, XID, BAR1, PERSISTENCE, COMPUTE, CLOCKS, FABRIC)
