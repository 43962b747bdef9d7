"""UCX_TLS: the transports that UCX may use, against those that the machine needs."""

from __future__ import annotations

from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.job import spread, usable_ports
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.software import Software, software
from rdmakit.doctor.ucx_words import allowed_transports, near, not_available

__all__ = ["CHECKS"]

_SHARED = ("posix", "sysv", "xpmem", "cma", "knem")
_RDMA = ("rc_", "dc_", "ud_", "gga", "srd")


def _tls(context: Context) -> Iterator[Finding]:
    own = software(context)
    text = context.environ.get("UCX_TLS")
    if text is None or text.strip() in ("", "all"):
        yield TLS.finding(Status.OK, "UCX_TLS is not set: everything is allowed")
        return
    offered = own.transports
    known = tuple(offered) if offered is not None else (*_SHARED, "self", "tcp")
    if offered is None:
        if usable_ports(context):
            known = (*known, "rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5")
        if context.machine.gpus:
            known = (*known, "cuda_copy", "cuda_ipc", "gdr_copy")
    allowed, missing = allowed_transports(text, known)
    findings = list(_no_network(context, own, text, allowed))
    if not findings:
        findings += _no_local(context, text, allowed)
    findings += _no_cuda(context, own, text, allowed, missing)
    findings += _unknown(own, text, known, missing)
    if (
        own.ucx is not None
        and own.ucx.refused
        and not any(f.status is Status.FAIL for f in findings)
    ):
        findings.append(
            TLS.finding(
                Status.FAIL,
                f"UCX does not start with UCX_TLS={text}: "
                + ("; ".join(own.ucx.said) or own.ucx.refused),
                cure="unset UCX_TLS",
                urgency=20,
            )
        )
    yield from findings
    if not findings:
        yield TLS.finding(Status.OK, f"UCX_TLS={text}: {', '.join(allowed)}")


def _no_network(
    context: Context, own: Software, text: str, allowed: tuple[str, ...]
) -> Iterator[Finding]:
    rdma = [name for name in allowed if name in own.rdma_transports or name[:3] in _RDMA]
    ports = usable_ports(context)
    add = "rc" if ports or own.rdma_transports else "tcp"
    if not rdma and "tcp" not in allowed:
        apart = spread(context)
        yield TLS.finding(
            Status.WARN if apart is False else Status.FAIL,
            f"UCX_TLS={text} leaves no transport between nodes"
            + (f", only {', '.join(allowed)}" if allowed else ""),
            expected="tcp, or rc (dc, ud) over RDMA, among them",
            cure=_added(text, add),
            urgency=12,
        )
    elif not rdma and ports:
        yield TLS.finding(
            Status.FAIL,
            f"UCX_TLS={text} shuts RDMA out, though {', '.join(ports)} would serve",
            expected="rc (or dc) among them",
            cure=_added(text, "rc"),
            urgency=13,
        )


def _added(text: str, name: str) -> str:
    if text.startswith("^"):
        return "unset UCX_TLS"
    return f"unset UCX_TLS, or export UCX_TLS={text},{name}"


def _no_local(context: Context, text: str, allowed: tuple[str, ...]) -> Iterator[Finding]:
    if not set(allowed) & set(_SHARED):
        alone = context.job_size > 1 and len(context.ranks) == 1
        yield TLS.finding(
            Status.OK if alone else Status.WARN,
            f"UCX_TLS={text} has no shared memory (sm): ranks of one node talk through the network",
            expected="sm among them",
            cure=_added(text, "sm"),
            urgency=60,
        )
    if "self" not in allowed:
        yield TLS.finding(
            Status.WARN,
            f"UCX_TLS={text} has no self: a rank's messages to itself take a detour or fail",
            expected="self among them",
            cure=_added(text, "self"),
            urgency=60,
        )


def _no_cuda(
    context: Context, own: Software, text: str, allowed: tuple[str, ...], missing: tuple[str, ...]
) -> Iterator[Finding]:
    asked = [name for name in missing if name.startswith(("cuda", "gdr"))]
    if asked and own.transports is not None and not own.has_cuda:
        yield TLS.finding(
            Status.FAIL if context.machine.gpus else Status.WARN,
            f"UCX_TLS={text} asks for {', '.join(asked)}, but this UCX has no CUDA",
            expected="a UCX with libuct_cuda and a driver that it can load",
            cure="pip install 'rdmakit[cuda12]', or export UCX_TLS without "
            f"{', '.join(asked)}; rdmakit doctor --only ucx.cuda says what is missing",
            urgency=17,
        )
    elif context.machine.gpus and own.has_cuda and "cuda_copy" not in allowed:
        yield TLS.finding(
            Status.WARN,
            f"UCX_TLS={text} has no cuda, and this node has {len(context.machine.gpus)} GPU(s): "
            "UCX would take a GPU pointer for host memory",
            expected="cuda among them",
            cure=_added(text, "cuda"),
            urgency=19,
        )


def _unknown(
    own: Software, text: str, known: tuple[str, ...], missing: tuple[str, ...]
) -> Iterator[Finding]:
    said = not_available(own.ucx.said, "transport") if own.ucx is not None else ()
    names = [n for n in dict.fromkeys((*missing, *said)) if not n.startswith(("cuda", "gdr"))]
    if own.transports is None or not names:
        return
    words = (*known, "sm", "shm", "rc", "ud", "dc", "cuda", "tcp", "self", "ib", "mm")
    guesses = [f"{name} (perhaps {guess})" for name in names if (guess := near(name, words, 0.6))]
    rest = [name for name in names if not near(name, words, 0.6)]
    yield TLS.finding(
        Status.WARN,
        f"UCX_TLS={text}: this UCX has no {', '.join([*guesses, *rest])}; it goes on without",
        expected=f"of {', '.join(known)}",
        cure="take the name out of UCX_TLS, or correct it",
        urgency=30,
    )


TLS = Check(
    "ucx.tls",
    "UCX_TLS",
    "A list of transports that lacks the one that joins the nodes ends the job or slows it down.",
    _tls,
    seconds=60,
)

CHECKS = (TLS,)
