"""What a run of ``rdmakit doctor`` consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Check, Finding
from rdmakit.doctor.supervise import Limits
from rdmakit.doctor.worker import WORKER
from rdmakit.protocols import Bootstrap
from rdmakit.report.doctor_text import Listed
from rdmakit.survey.doctor_options import DoctorOptions

__all__ = ["JobStep", "Run"]


@dataclass(frozen=True)
class JobStep:
    """A check of the job as a whole."""

    id: str
    title: str
    why: str
    compare: Callable[[Sequence[NodeReport]], Sequence[Finding]] | None = None
    """Runs on rank 0 alone, on the reports, also where ranks are lost; or ..."""
    together: Callable[[Bootstrap, Sequence[NodeReport]], Sequence[Finding]] | None = None
    """... collective over the bootstrap's ranks, where all are there. The reports are there on
    rank 0 only, whose findings count; what it waits for must have a deadline of its own."""
    seconds: float = 120.0
    """After which the watchdog ends the job."""
    needs: Sequence[str] = ("job",)


@dataclass(frozen=True)
class Run:
    """What is run, and how long it may take."""

    options: DoctorOptions
    checks: Sequence[Check]
    """All that there are."""
    selected: list[str]
    """Identifiers of those that run."""
    steps: Sequence[JobStep] = ()
    command: Sequence[str] = WORKER
    limits: Limits = field(default_factory=Limits)

    @property
    def seconds(self) -> dict[str, float]:
        """How long each check may take."""
        return {check.id: check.seconds for check in self.checks}

    @property
    def whys(self) -> dict[str, str]:
        """Why each check matters."""
        every: list[Listed] = [*self.checks, *self.steps]
        return {one.id: one.why for one in every}
