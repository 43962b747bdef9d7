"""This machine: sysfs first, NVML in a child process, commands for what is still missing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rdmakit.discovery.sysfs import read_sysfs
from rdmakit.drivers.host import HostTree, Runner, run
from rdmakit.drivers.nvml import ask_nvml, have_pynvml
from rdmakit.topology.assemble import assemble
from rdmakit.topology.facts import NvmlFacts
from rdmakit.topology.model import Machine
from rdmakit.topology.texts import Texts, read_texts

__all__ = ["COMMANDS", "Found", "find_out", "probe_machine", "run_commands"]

COMMANDS: dict[str, tuple[str, ...]] = {
    "nvidia-smi-topo-m.txt": ("nvidia-smi", "topo", "-m"),
    "nvidia-smi-topo-p2p.txt": ("nvidia-smi", "topo", "-p2p", "rw"),
    "nvidia-smi-L.txt": ("nvidia-smi", "-L"),
    "ibstat.txt": ("ibstat",),
    "ibstatus.txt": ("ibstatus",),
    "ibv_devinfo-v.txt": ("ibv_devinfo", "-v"),
    "rdma-link.txt": ("rdma", "link"),
    "show_gids.txt": ("show_gids",),
    "lspci-vvv.txt": ("lspci", "-vvv"),
    "ucx_info-v.txt": ("ucx_info", "-v"),
    "ucx_info-d.txt": ("ucx_info", "-d"),
    "nvidia-smi-q.txt": ("nvidia-smi", "-q"),
    "dmesg.txt": ("dmesg",),
    "lsmod.txt": ("lsmod",),
}
"""Commands whose output is understood, by the file that keeps it."""

_LIMIT = 20.0
"""Seconds for one command; they run at the same time."""


@dataclass(frozen=True)
class Found:
    """A machine, and what it was made of."""

    machine: Machine
    texts: Texts
    nvml: NvmlFacts
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Texts by the name of their file, where they were read from files."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Settings that were collected with them."""
    root: str = ""
    """Directory of ``sys`` and ``proc``, where there is one."""
    path: str = ""
    """What it was read from."""


def probe_machine(
    tree: HostTree | None = None,
    runner: Runner = run,
    environ: Mapping[str, str] | None = None,
) -> Machine:
    """Return the machine below ``tree``. Local, blocking for seconds at most; never raises."""
    return find_out(tree, runner, environ).machine


def find_out(
    tree: HostTree | None = None,
    runner: Runner = run,
    environ: Mapping[str, str] | None = None,
    nvml: NvmlFacts | None = None,
) -> Found:
    """Return the machine and its sources. See :func:`probe_machine`.

    ``nvml``: what NVML said already; None: it is asked.
    """
    tree = tree or HostTree()
    sysfs = read_sysfs(tree)
    driver = _has_nvidia(tree)
    notes: list[str] = []
    if nvml is None:
        nvml = _ask(runner) if driver else NvmlFacts(problem="no NVIDIA driver")
    wanted: list[str] = []
    if driver and not nvml.gpus:
        notes.append(f"NVML: {nvml.problem or 'no GPU'}; nvidia-smi is asked instead")
        wanted += ["nvidia-smi-topo-m.txt", "nvidia-smi-topo-p2p.txt", "nvidia-smi-L.txt"]
    if sysfs.nics:
        wanted.append("ibv_devinfo-v.txt")  # sysfs does not tell the active MTU
    texts = read_texts(run_commands(runner, wanted))
    machine = assemble(sysfs, nvml, texts, _surroundings(tree, environ))
    return Found(machine.noted(*notes), texts, nvml)


def run_commands(runner: Runner, names: Sequence[str]) -> dict[str, str]:
    """Return the outputs of the commands of these files; those that are not here are left out."""
    if not names:
        return {}
    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(lambda name: runner(COMMANDS[name], _LIMIT), names))
    return {
        # ibstat and others tell of trouble after good output, on stderr.
        name: result.stdout + result.stderr
        for name, result in zip(names, results, strict=True)
        if not result.error and (result.stdout or result.ok)
    }


def _ask(runner: Runner) -> NvmlFacts:
    if not have_pynvml():
        return NvmlFacts(problem="nvidia-ml-py is not installed")
    return ask_nvml(runner)


def _has_nvidia(tree: HostTree) -> bool:
    return any(
        tree.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
    )


def _surroundings(tree: HostTree, environ: Mapping[str, str] | None) -> dict[str, str]:
    env = os.environ if environ is None else environ
    found = {}
    kind = env.get("container", "")
    if tree.exists("/.dockerenv"):
        kind = kind or "docker"
    if tree.exists("/run/.containerenv"):
        kind = kind or "podman"
    if env.get("KUBERNETES_SERVICE_HOST"):
        kind = "Kubernetes"
    if env.get("APPTAINER_CONTAINER") or env.get("SINGULARITY_CONTAINER"):
        kind = "Apptainer"
    if kind:
        found["container"] = kind
    return found
