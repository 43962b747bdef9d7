"""Settings of UCX that contradict the machine, and names that no UCX knows."""

from __future__ import annotations

from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.job import spread, usable_ports
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.software import Software, software, yes
from rdmakit.doctor.ucx_words import near, unknown_settings
from rdmakit.topology.netdevices import read_net_devices

__all__ = ["CHECKS"]


def _devices(context: Context) -> Iterator[Finding]:
    own = software(context)
    text = context.environ.get("UCX_NET_DEVICES")
    ports = usable_ports(context)
    if text is None:
        yield NET_DEVICES.finding(Status.OK, "UCX_NET_DEVICES is not set")
        return
    names, wrong = read_net_devices(text)
    plain = [
        name for name in names or () if not name.startswith("^") and not set(name) & set("*?[")
    ]
    for problem in wrong:
        yield NET_DEVICES.finding(
            Status.WARN if plain else Status.FAIL,
            problem,
            cure=f"export UCX_NET_DEVICES={_good(context)}",
            urgency=13,
        )
    if names is None:
        if not wrong:
            yield NET_DEVICES.finding(Status.OK, f"UCX_NET_DEVICES={text}")
        return
    bad = {name: why for name in names if (why := _why_bad(context, own, name))}
    # What a port is for is told by signs: a person who names it may know better.
    odd = [name for name, why in bad.items() if why.startswith("is no compute port")]
    for name, why in bad.items():
        left = [other for other in names if other not in bad or other in odd]
        yield NET_DEVICES.finding(
            Status.WARN if left else Status.FAIL,
            f"UCX_NET_DEVICES={text}: {name} {why}"
            + ("" if left else "; no device that leads to other nodes is left"),
            subject=name,
            expected=f"of {', '.join(_known(context, own)) or 'the devices here'}",
            cure=f"export UCX_NET_DEVICES={','.join(left) or _good(context)}, or unset it",
            urgency=12,
        )
    good = [name for name in names if name not in bad or name in odd]
    if good and ports and not any(name in own_ports(context) for name in good):
        yield NET_DEVICES.finding(
            Status.FAIL,
            f"UCX_NET_DEVICES={text} has none of this node's RDMA ports: there is no RDMA with it",
            expected=", ".join(ports),
            cure=f"export UCX_NET_DEVICES={','.join(ports)}, or unset it",
            urgency=13,
        )
    elif not bad and not wrong:
        yield NET_DEVICES.finding(Status.OK, f"UCX_NET_DEVICES={text}")


def own_ports(context: Context) -> set[str]:
    """Return the RDMA ports of a node, as UCX names them. Local."""
    return {port.device for port in context.fabric.ports if port.device}


def _known(context: Context, own: Software) -> list[str]:
    if own.net_devices:
        return [name for name in own.net_devices if name != "lo"]
    up = [one.name for one in own.interfaces if one.up and one.address and not one.loopback]
    return [*usable_ports(context), *up]


def _good(context: Context) -> str:
    ports = usable_ports(context)
    if ports:
        return ",".join(ports)
    own = software(context)
    up = [i for i in own.interfaces if i.up and i.address and not (i.loopback or i.local)]
    return next((i.name for i in sorted(up, key=lambda i: not i.default)), "all")


def _why_bad(context: Context, own: Software, name: str) -> str:
    """Return why a name of UCX_NET_DEVICES is of no use, or nothing."""
    if name.startswith("^") or set(name) & set("*?["):
        return ""  # told already
    port = next((p for p in context.fabric.ports if p.device == name), None)
    if port is not None:
        if port.health.healthy is False and not port.health.degraded:
            return f"is not usable: {port.health.why}"
        if port.role != "compute":
            return f"is no compute port: {port.reason}"
        return ""
    if f"{name}:1" in own_ports(context):
        return f"lacks its port, and UCX does not find it: write {name}:1"
    if name == "lo":
        return "" if spread(context) is False else "leads to this host only"
    interface = next((i for i in own.interfaces if i.name == name), None)
    if interface is None:
        if name in own.net_devices:
            return ""
        if own.transports is None and not own.interfaces and not context.machine.nics:
            return ""  # nothing is known of this node's devices
        guess = near(name, _known(context, own))
        return "is no device of this node" + (f" (perhaps {guess})" if guess else "")
    if not interface.up:
        return "is down"
    if interface.local:
        return (
            "joins containers or guests of this host only; on other hosts it has the same address"
        )
    if not interface.address and name not in own.net_devices:
        return "has no IPv4 address"
    return ""


def _names(context: Context) -> Iterator[Finding]:
    own = software(context)
    names = [name for name in context.environ if name.startswith("UCX_")]
    if not names:
        yield NAMES.finding(Status.OK, "no UCX_* variable is set")
        return
    if own.ucx is None or not own.ucx.names:
        why = (
            "UCX does not list its settings" if own.ucx and not own.ucx.problem else "no UCX to ask"
        )
        yield NAMES.finding(Status.SKIPPED, f"{len(names)} set; {why}")
        return
    modules = [*(["cuda"] if own.ucx.has_cuda else []), *(["ib"] if own.ucx.has_ib else [])]
    modules += [n for n in ("cma", "knem", "xpmem") if n in (own.transports or {})]
    unknown = unknown_settings(names, own.ucx.names, modules)
    if own.ucx.unused:
        unknown = [(name, guess) for name, guess in unknown if name in own.ucx.unused]
    for name, guess in unknown:
        yield NAMES.finding(
            Status.WARN,
            f"{name} is no setting of UCX {own.ucx.version}: it does nothing"
            + (f"; perhaps {guess} was meant" if guess else ""),
            subject=name,
            cure=f"export {guess}={context.environ[name]}; unset {name}"
            if guess
            else f"unset {name}",
            urgency=25 if guess else 70,
        )
    if not unknown:
        yield NAMES.finding(Status.OK, f"UCX knows all of {', '.join(sorted(names))}")


def _contradictions(context: Context) -> Iterator[Finding]:
    env = context.environ
    machine = context.machine
    both = bool(machine.gpus and usable_ports(context))
    text = env.get("UCX_IB_GPU_DIRECT_RDMA", "")
    found = []
    if yes(env, "UCX_IB_GPU_DIRECT_RDMA") is False and both:
        found.append(
            SETTINGS.finding(
                Status.FAIL,
                f"UCX_IB_GPU_DIRECT_RDMA={text} turns GPUDirect RDMA off, and this node has GPUs "
                "and NICs",
                expected="try (UCX's own)",
                cure="unset UCX_IB_GPU_DIRECT_RDMA",
                urgency=14,
            )
        )
    if yes(env, "UCX_MEMTYPE_CACHE") is True and machine.gpus:
        found.append(
            SETTINGS.finding(
                Status.WARN,
                "UCX_MEMTYPE_CACHE=y: memory that was allocated before UCX's hooks were there, as "
                "by CuPy's pool, is taken for host memory",
                expected="n, or not set",
                cure="unset UCX_MEMTYPE_CACHE",
                urgency=30,
            )
        )
    # With GPUs each rank is given the NICs near its own: it loses where there are two for each.
    per_gpu = 2 * max(1, len(machine.gpus))
    if env.get("UCX_MAX_RNDV_RAILS") == "1" and len(usable_ports(context)) >= per_gpu:
        found.append(_one_rail(context))
    scheme = env.get("UCX_RNDV_SCHEME", "").lower()
    if scheme == "get_zcopy" and both and software(context).registering("cuda") is not None:
        bad = [d for d, ok in (software(context).registering("cuda") or {}).items() if not ok]
        if bad:
            found.append(
                SETTINGS.finding(
                    Status.FAIL,
                    f"UCX_RNDV_SCHEME={scheme} wants GPU memory registered, which {', '.join(bad)} "
                    "cannot",
                    cure="unset UCX_RNDV_SCHEME",
                    urgency=20,
                )
            )
    found += _gid_index(context)
    yield from found
    if not found:
        count = sum(name.startswith("UCX_") for name in env)
        yield SETTINGS.finding(
            Status.OK, f"none of {count} UCX_* setting(s) is against the machine"
        )


def _one_rail(context: Context) -> Finding:
    ports = usable_ports(context)
    return SETTINGS.finding(
        Status.WARN,
        f"UCX_MAX_RNDV_RAILS=1: a message uses one of {', '.join(ports)}",
        expected="2 or more",
        cure="unset UCX_MAX_RNDV_RAILS (import ucxx sets it; rdmakit takes that back)",
        urgency=30,
    )


def _gid_index(context: Context) -> Iterator[Finding]:
    text = context.environ.get("UCX_IB_GID_INDEX", "auto")
    if not (text.isascii() and text.isdigit()):
        return
    for nic in context.machine.nics:
        for port in nic.ports:
            if port.link_layer != "Ethernet" or not port.gids or port.active is False:
                continue
            title = f"{nic.name or nic.label}:{port.number}"
            gid = next((g for g in port.gids if g.index == int(text)), None)
            second = [g for g in port.gids if g.kind == "RoCE v2"]
            if gid is None or (second and gid.kind not in (None, "RoCE v2")):
                what = f"is {gid.kind}" if gid else "is not in its GID table"
                yield SETTINGS.finding(
                    Status.FAIL if gid is None else Status.WARN,
                    f"UCX_IB_GID_INDEX={text}: on {title} it {what}",
                    subject=title,
                    expected=f"{second[-1].index if second else 'auto'} (RoCE v2)",
                    cure="unset UCX_IB_GID_INDEX: auto takes a RoCE v2 entry (show_gids)",
                    urgency=18,
                )


def _registration(context: Context) -> Iterator[Finding]:
    env = context.environ
    rdma = bool(usable_ports(context))
    found = []
    for name in sorted(env):
        if name.endswith("_RCACHE_ENABLE") or name in ("UCX_RCACHE_ENABLE", "UCX_IB_RCACHE"):
            if yes(env, name) is False:
                found.append((f"{name}={env[name]}: every message registers its memory anew", name))
        elif name in ("UCX_MEM_EVENTS", "UCX_MEM_MMAP_HOOK_MODE", "UCX_MEM_CUDA_HOOK_MODE"):
            if yes(env, name) is False or env[name].lower() == "none":
                found.append(
                    (
                        f"{name}={env[name]}: UCX does not see memory being freed, so it cannot "
                        "keep registrations",
                        name,
                    )
                )
        elif name in ("UCX_RCACHE_MAX_REGIONS", "UCX_RCACHE_MAX_SIZE") and env[name] == "0":
            found.append((f"{name}=0: no registration is kept", name))
    for text, name in found:
        yield REGISTRATION.finding(
            Status.WARN if rdma or context.machine.gpus else Status.OK,
            text,
            subject=name,
            expected="UCX's own",
            cure=f"unset {name}",
            urgency=45,
        )
    if not found:
        yield REGISTRATION.finding(
            Status.OK, "the registration cache and its hooks are as UCX has them"
        )


NET_DEVICES = Check(
    "ucx.net_devices",
    "UCX_NET_DEVICES",
    "UCX goes on without a device that it does not find, over TCP or not at all.",
    _devices,
    seconds=60,
)
NAMES = Check(
    "ucx.names",
    "Names of UCX_* variables",
    "UCX ignores a variable whose name it does not know, and says so in a warning at most.",
    _names,
    seconds=60,
)
SETTINGS = Check(
    "ucx.settings",
    "UCX settings against the machine",
    "A setting that was right on another machine turns GPUDirect or a rail off here.",
    _contradictions,
    seconds=60,
)
REGISTRATION = Check(
    "ucx.registration",
    "UCX's registration cache",
    "Registering memory takes longer than sending it: UCX keeps registrations where it may.",
    _registration,
)

CHECKS = (NET_DEVICES, NAMES, SETTINGS, REGISTRATION)
