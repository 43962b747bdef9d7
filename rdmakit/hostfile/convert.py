"""A hostfile written for another launcher. Pure."""

from __future__ import annotations

from rdmakit.errors import InvalidArgument
from rdmakit.hostfile.model import Host, Hostfile
from rdmakit.hostfile.nodelist import compress

__all__ = ["TARGETS", "convert"]

TARGETS = ("openmpi", "hydra", "intelmpi", "deepspeed", "slurm")


def convert(hostfile: Hostfile, target: str, slots: int | None = None) -> str:
    """Return the text of ``hostfile`` in another dialect, with a final line end.

    Args:
        hostfile: a file without errors.
        target: one of :data:`TARGETS`.
        slots: for hosts without a number of their own.

    Raises:
        InvalidArgument: the file has errors, the target is not known, or it needs a number that
            neither the file nor ``slots`` gives.
    """
    if target not in TARGETS:
        raise InvalidArgument(f"{target!r}; one of {', '.join(TARGETS)}")
    if hostfile.errors:
        raise InvalidArgument(f"the file has errors: {hostfile.errors[0]}")
    if target == "slurm":
        return compress(host.name for host in hostfile.hosts) + "\n"
    lines = []
    for host in hostfile.hosts:
        count = host.slots if host.slots is not None else slots
        if count is None and target != "openmpi":
            raise InvalidArgument(
                f"{host.name}: {target} needs a number of slots, which the file does not give; say "
                "--slots N"
            )
        lines.append(_line(host, target, count))
    return "\n".join(lines) + "\n"


def _line(host: Host, target: str, count: int | None) -> str:
    if target in ("hydra", "intelmpi"):
        name = f"[{host.name}]" if ":" in host.name else host.name
        user = f" user={host.user}" if host.user else ""
        return f"{name}:{count}{user}"
    name = f"{host.user}@{host.name}" if host.user else host.name
    words = [name] + ([f"slots={count}"] if count is not None else [])
    if host.max_slots is not None and target == "openmpi":
        words.append(f"max_slots={host.max_slots}")
    return " ".join(words)
