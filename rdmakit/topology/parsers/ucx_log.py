"""Messages of UCX, and what each means for the person who reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rdmakit.topology.text import lines_of

__all__ = ["LogFinding", "read_ucx_log"]


@dataclass(frozen=True)
class LogFinding:
    """A message that is understood."""

    line: int
    problem: str
    fix: str
    fatal: bool = False
    """Whether UCX cannot be used at all after it."""


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    problem: str
    fix: str
    fatal: bool = False


def _rule(pattern: str, problem: str, fix: str, *, fatal: bool = False) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE), problem, fix, fatal)


_LIBUCT = "ucx_info -d shows what is left; UCX_LOG_LEVEL=debug names the module that fails to load"
_RULES = (
    _rule(
        r"transport '(?P<what>cuda\w*|gdr_copy|rocm\w*)' is not available",
        "UCX_TLS asks for {what}, but UCX has no such transport: built without CUDA, or "
        "libuct_cuda or libcuda could not be loaded",
        f"use a UCX built with CUDA, or install its CUDA module; {_LIBUCT}",
    ),
    _rule(
        r"transport '(?P<what>(?:rc|ud|dc)\w*|ib)' is not available",
        "UCX_TLS asks for {what}, but UCX has no RDMA transport{rest}: configured without "
        "verbs, or no usable RDMA device in this container",
        "check ibv_devinfo here, install libibverbs and its providers, use a UCX with "
        f"--with-verbs; {_LIBUCT}",
    ),
    _rule(
        r"transport '(?P<what>\S+)' is not available",
        "UCX_TLS asks for {what}, which this UCX does not have",
        _LIBUCT,
    ),
    _rule(
        r"network device '(?P<what>[^']+)' is not available",
        "UCX_NET_DEVICES asks for {what}, which UCX does not see; other devices, perhaps tcp "
        "only, take its place silently",
        "write device:port (mlx5_0:1) as ucx_info -d prints it; in a container see that "
        "/dev/infiniband and the verbs providers are there",
    ),
    _rule(
        r"no usable transports/devices",
        "UCX has no transport that it may use",
        "unset UCX_TLS and UCX_NET_DEVICES, then narrow them again",
        fatal=True,
    ),
    _rule(
        r"set max locked memory|ibv_create_cq\(.*Cannot allocate memory|"
        r"ibv_(?:exp_)?reg_mr.*Cannot allocate memory|RLIMIT_MEMLOCK",
        "the limit of locked memory is too low{limit}",
        "ulimit -l unlimited: limits.conf, docker --ulimit memlock=-1, LimitMEMLOCK of the "
        "daemon that starts the ranks (sshd, slurmd)",
        fatal=True,
    ),
    _rule(
        r"dlopen\('(?P<file>[^']*(?:uct_(?P<what>\w+?)|ucm_(?P<ucm>\w+?))\.so[^']*)'.*"
        r"No such file",
        "UCX's core is there, its {module} module is not: {file} (modules come in a package of "
        "their own)",
        "install UCX's {module} plug-in package of the same version, or set UCX_MODULE_DIR",
    ),
    _rule(
        r"dlopen\('(?P<file>[^']*)'.*failed: (?P<what>.*)",
        "a UCX module does not load: {file}: {what}",
        "install the library that it names, in the version that it wants",
    ),
    _rule(
        r"cuIpcGetMemHandle.*(?:failed|invalid argument)",
        "the buffer has no legacy CUDA IPC handle: it comes from cudaMallocAsync, VMM or managed "
        "memory (CuPy's MemoryAsyncPool, RMM async)",
        "use CuPy's default pool for communicated buffers, or take cuda_ipc out of UCX_TLS",
        fatal=True,
    ),
    _rule(
        r"(?:cuIpcOpenMemHandle|open ipc mem handle).*(?:failed|already|invalid)",
        "a CUDA IPC handle could not be opened: GPU of the peer not visible here (one GPU per "
        "task, containers with other PID namespaces, MIG), or opened twice",
        "let every rank of a node see all its GPUs (--gpus-per-node, --gpu-bind=none); share the "
        "PID namespace",
    ),
    _rule(
        r"(?:gdr_open|gdrdrv|gdr_copy).*(?:fail|could not|unable)",
        "GDRCopy's kernel module is not usable; small messages from GPU memory are slow",
        "load gdrdrv and let the container see /dev/gdrdrv",
    ),
    _rule(
        r"reg_mr\(.*failed: Bad address|failed to register.*cuda",
        "the NIC cannot register GPU memory: no nvidia_peermem, no dma-buf",
        "modprobe nvidia_peermem (rebuilt after the network driver), or open kernel modules "
        "with dma-buf",
    ),
    _rule(
        r"tcp/(?P<what>docker\w*|virbr\w*|cni\w*|br-\w+|veth\w*)|"
        r"dest_addr=(?P<address>172\.17\.\d+\.\d+)",
        "UCX chose {bridge}, whose address is the same on every host or leads nowhere",
        "UCX_NET_DEVICES=<the RDMA ports, or the Ethernet device that joins the hosts>",
    ),
    _rule(
        r"(?:uct_iface_open\((?:posix|sysv)|posix|/dev/shm|shm).*(?:Out of memory|No space left)|"
        r"Bus error: nonexistent physical address",
        "/dev/shm is too small (docker gives 64 MB)",
        "docker --shm-size=1g or --ipc=host; in Kubernetes an emptyDir of medium Memory",
        fatal=True,
    ),
    _rule(
        r"process_vm_readv.*(?:Operation not permitted|failed)|CMA.*(?:permission|not permitted)",
        "CMA may not read the peer's memory: ptrace is restricted or other user namespace",
        "kernel.yama.ptrace_scope=0, docker --cap-add=SYS_PTRACE, or UCX_TLS without cma",
    ),
    _rule(
        r"modify.*QP.*(?:RTR|timed out|Invalid argument)|ibv_modify_qp.*fail",
        "the connection's addresses do not reach each other: wrong GID (link-local, RoCE v1) or "
        "different MTU on the two ends",
        "compare show_gids and active_mtu of both hosts; UCX_IB_GID_INDEX=<RoCE v2 with IP>",
        fatal=True,
    ),
    _rule(
        r"Transport retry count exceeded|transport retry counter exceeded|vend(?:or)?(?:_| )err"
        r" ?(?:129|0x81)|synd 0x15|vend 0x81",
        "the peer did not answer on the fabric: peer gone, wrong GID, a lossy RoCE network, or "
        "MTU too large for a switch",
        "compare GIDs and MTU of both hosts, check PFC/ECN and the link's error counters",
        fatal=True,
    ),
    _rule(
        r"connect\(.*failed: (?P<what>Connection refused|No route to host|Connection timed out|"
        r"Network is unreachable)",
        "a TCP connection failed: {what}",
        "name the device that joins the hosts in UCX_NET_DEVICES; check the firewall",
    ),
    _rule(
        r"open\((?:file_name=)?/proc/\d+/fd/\S*\) failed|/proc/\d+/fd/\d+.*(?:No such file|denied)",
        "a rank cannot reach its neighbour's shared memory through /proc: other PID namespace "
        "(containers on one host) or hardening",
        "share the PID namespace (docker --pid=host, one container per node), or "
        "UCX_POSIX_USE_PROC_LINK=n with a common /dev/shm",
    ),
    _rule(
        r"fork\(\) has been issued|ibv_fork_init",
        "a process forked while RDMA memory was registered: the child or both may read wrong data",
        "start children by spawn (multiprocessing.set_start_method('spawn'))",
    ),
    _rule(
        r"no (?:active messages|am|remote registered memory access|tag) .*transport",
        "two ranks have no transport that can do what is asked, for the reasons in the message",
        "UCX_TLS must hold a network transport and, for GPU memory, cuda",
        fatal=True,
    ),
    _rule(
        r"failed to (?:query|get) gid|invalid gid|no (?:valid|usable) gid",
        "the GID that UCX was told to use does not exist on that port",
        "unset UCX_IB_GID_INDEX, or take the RoCE v2 index that show_gids has on this host",
        fatal=True,
    ),
    _rule(
        r"Destination is unreachable",
        "two ranks have no transport in common",
        "UCX_NET_DEVICES and UCX_TLS must allow the same on both hosts",
        fatal=True,
    ),
    _rule(
        r"unused env(?:ironment)? variables?:? (?P<what>UCX_\w+)",
        "{what} is no variable of this UCX: a typing error or another release",
        "ucx_info -cf lists those it has",
    ),
    _rule(
        r"/dev/infiniband/\S+.*(?:Permission denied|No such file)|Couldn't open uverbs",
        "the RDMA devices cannot be opened",
        "docker --device=/dev/infiniband; rights on /dev/infiniband/uverbs*",
        fatal=True,
    ),
)


def read_ucx_log(text: str) -> list[LogFinding]:
    """Return what UCX's messages in ``text`` mean, in order, each meaning once. Never raises."""
    found: dict[str, LogFinding] = {}
    for number, line in enumerate(lines_of(text), 1):
        for rule in _RULES:
            match = rule.pattern.search(line)
            if match is None:
                continue
            words = _words(match, line)
            problem = rule.problem.format(**words)
            fatal = rule.fatal or re.search(r"\bFATAL\b", line) is not None
            known = found.get(problem)
            if known is None:
                found[problem] = LogFinding(number, problem, rule.fix.format(**words), fatal)
            break
    return list(found.values())


def _rest(line: str) -> str:
    """Return what a list of the transports that there are says about CUDA."""
    listed = re.search(r"one or more of: (.*)", line)
    if listed is None:
        return ""
    have = "is" if re.search(r"\bcuda", listed[1]) else "is not"
    return f" at all (CUDA {have} there)"


def _words(match: re.Match[str], line: str) -> dict[str, str]:
    said = {name: value or "" for name, value in match.groupdict().items()}
    limit = re.search(r"current:\s*(\d+)\s*kbytes", line)
    return {
        "what": "",
        "file": "",
        **said,
        "module": (said.get("what") or said.get("ucm") or "").upper(),
        "limit": f" ({limit[1]} kB)" if limit else "",
        "rest": _rest(line),
        "bridge": said.get("what") or f"an address of docker0 ({said.get('address', '')})",
    }
