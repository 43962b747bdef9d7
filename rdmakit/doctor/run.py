"""Running checks in this process. A check may raise; who runs it is told, not stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rdmakit.doctor.context import Context, missing
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["run_check", "run_checks"]


def run_check(check: Check, context: Context) -> list[Finding]:
    """Return what a check finds; a check that raises found nothing out, and says so."""
    why = missing(context, check.needs)
    if why:
        return [check.finding(Status.SKIPPED, why)]
    try:
        findings = list(check.run(context))
    except Exception as exc:
        return [
            check.finding(Status.UNKNOWN, f"the check itself failed: {type(exc).__name__}: {exc}")
        ]
    return findings or [check.finding(Status.UNKNOWN, "the check told nothing")]


def run_checks(checks: Sequence[Check], context: Context) -> Iterator[list[Finding]]:
    """Yield each check's findings as it ends."""
    for check in checks:
        yield run_check(check, context)
