"""The kernel and how it is set: release, NUMA balancing, clock source, CPU frequency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import in_container, release
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["CHECKS"]

_OLDEST = (4, 18)
"""The oldest kernel that present NVIDIA and RDMA drivers are made for (RHEL 8)."""
_CPUS = "/sys/devices/system/cpu"
_GOOD_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page", "timebase")
_PSTATE = ("intel_pstate", "amd-pstate-epp", "amd-pstate")
_MOST_CPUS = 1024


def _kernel(context: Context) -> Iterator[Finding]:
    told = context.machine.software.get("kernel", "") or context.read("/proc/sys/kernel/osrelease")
    numbers = release(told)
    if not told or numbers is None:
        yield KERNEL.finding(Status.UNKNOWN, "the kernel's release is not known")
        return
    if numbers < _OLDEST:
        yield KERNEL.finding(
            Status.WARN,
            f"Linux {told}",
            expected="4.18 or newer; 5.12 or newer for GPUDirect over dma-buf",
            cure="install a newer kernel, or a newer release of the distribution, and reboot",
            urgency=70,
        )
    elif (
        context.live
        and not in_container(context)
        and context.tree.listdir("/lib/modules")
        and not context.tree.exists(f"/lib/modules/{told}/.")
    ):
        yield KERNEL.finding(
            Status.WARN,
            f"Linux {told} runs, but its modules are gone from /lib/modules: another kernel was "
            "installed since it was booted",
            expected=f"/lib/modules/{told}",
            cure="reboot; until then modprobe loads nothing (nvidia_peermem, mlx5_ib)",
            urgency=25,
        )
    else:
        yield KERNEL.finding(Status.OK, f"Linux {told}")


def _balancing(context: Context) -> Iterator[Finding]:
    text = context.read("/proc/sys/kernel/numa_balancing")
    nodes = len(context.machine.numa_nodes)
    if nodes < 2:
        yield BALANCING.finding(Status.SKIPPED, "one NUMA node: nothing is moved")
    elif text is None:
        yield BALANCING.finding(Status.UNKNOWN, "/proc/sys/kernel/numa_balancing cannot be read")
    elif text == "0" or not context.machine.gpus:
        here = "off" if text == "0" else "on, on a machine without GPUs"
        yield BALANCING.finding(Status.OK, here)
    else:
        yield BALANCING.finding(
            Status.WARN,
            f"on, over {nodes} NUMA nodes",
            expected="off on a machine with GPUs",
            cure="sysctl -w kernel.numa_balancing=0, and in /etc/sysctl.d for the next boot",
            urgency=75,
        )


def _clock(context: Context) -> Iterator[Finding]:
    base = f"{_CPUS.removesuffix('/cpu')}/clocksource/clocksource0"
    now = context.read(f"{base}/current_clocksource")
    if not now:
        yield CLOCK.finding(Status.UNKNOWN, "the clock source is not known")
    elif now in _GOOD_CLOCKS:
        yield CLOCK.finding(Status.OK, now)
    else:
        others = (context.read(f"{base}/available_clocksource") or "").split()
        good = next((name for name in _GOOD_CLOCKS if name in others), None)
        cure = (
            f"echo {good} > {base}/current_clocksource"
            if good
            else "boot with tsc=reliable clocksource=tsc; dmesg | grep -i tsc says why not"
        )
        yield CLOCK.finding(
            Status.WARN,
            f"{now}: reading the time asks a device",
            expected=good or "tsc, or the hypervisor's clock",
            cure=cure,
            urgency=75,
        )


def _governor(context: Context) -> Iterator[Finding]:
    found: Counter[str] = Counter()
    for name in context.tree.listdir(f"{_CPUS}/cpufreq")[:_MOST_CPUS]:
        base = f"{_CPUS}/cpufreq/{name}"
        governor = context.read(f"{base}/scaling_governor")
        if governor is None:
            continue
        driver = context.read(f"{base}/scaling_driver") or ""
        hint = context.read(f"{base}/energy_performance_preference") or ""
        # Hardware chooses the frequency there; the governor's name is a hint only.
        itself = driver in _PSTATE and hint in ("performance", "balance_performance")
        found["performance" if itself else governor] += 1
    slow = {name: count for name, count in found.items() if name != "performance"}
    if not found:
        yield GOVERNOR.finding(
            Status.SKIPPED, "no CPU frequency control is visible (firmware or hypervisor has it)"
        )
    elif not slow:
        yield GOVERNOR.finding(Status.OK, f"performance on {found.total()} group(s) of CPUs")
    else:
        told = ", ".join(f"{name} on {count}" for name, count in slow.items())
        yield GOVERNOR.finding(
            Status.WARN,
            f"{told} of {found.total()} group(s) of CPUs",
            expected="performance",
            cure="cpupower frequency-set -g performance",
            urgency=80,
        )


KERNEL = Check(
    "host.kernel",
    "Kernel",
    "Old kernels lack what GPUDirect needs (dma-buf from 5.12), and one whose modules are gone "
    "can load no driver.",
    _kernel,
)

BALANCING = Check(
    "host.numa_balancing",
    "NUMA balancing",
    "The kernel unmaps pages to see who uses them: faults in the middle of transfers, and on "
    "machines whose GPU memory is a NUMA node, of GPU memory too.",
    _balancing,
)

CLOCK = Check(
    "host.clocksource",
    "Clock source",
    "Polling and measuring read the clock all the time: 20 ns by the CPU's counter, a microsecond "
    "and more by hpet or acpi_pm.",
    _clock,
)

GOVERNOR = Check(
    "host.governor",
    "CPU frequency",
    "A CPU that sleeps deep and wakes slowly adds microseconds to every small message.",
    _governor,
)

CHECKS = (KERNEL, BALANCING, CLOCK, GOVERNOR)
