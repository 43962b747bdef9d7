"""What a run of ``rdmakit doctor`` consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rdmakit.doctor.messages import NodeReport, Order
from rdmakit.doctor.model import Check, Finding
from rdmakit.doctor.supervise import Limits
from rdmakit.doctor.worker import FACTS, WORKER
from rdmakit.proof import PathReport
from rdmakit.protocols import Bootstrap
from rdmakit.report.doctor_text import Listed
from rdmakit.survey.doctor_options import DoctorOptions

__all__ = ["JobStep", "Run"]


_FACTS_SECONDS = 60.0


@dataclass(frozen=True)
class JobStep:
    """Checks of the job as a whole, that run in one go."""

    checks: Sequence[Listed]
    """Identifiers that its findings have."""
    compare: Callable[[Sequence[NodeReport]], Sequence[Finding]] | None = None
    """Runs on rank 0 alone, also where ranks are lost, and on collected files; or ..."""
    nodes: Callable[[Bootstrap, NodeReport], Sequence[Finding]] | None = None
    """... collective over the first rank of each node, with its own node's report; or ..."""
    ranks: Callable[[Bootstrap], Sequence[Finding]] | None = None
    """... collective over all ranks. Both run where no rank is lost; rank 0's findings count, and
    what is waited for must have a deadline of its own."""
    seconds: float = 120.0
    """After which the watchdog ends the job."""


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
    between: frozenset[str] = frozenset()
    """Identifiers of the steps' checks that were asked for."""
    paths: Sequence[PathReport] = ()
    """Evidence about paths, once the step that collects it has run."""

    @property
    def seconds(self) -> dict[str, float]:
        """How long each check may take."""
        return {FACTS: _FACTS_SECONDS} | {check.id: check.seconds for check in self.checks}

    @property
    def order(self) -> Order:
        """What each node's worker is to do."""
        # To tell of itself a node starts processes of UCX, MPI and Python.
        facts = [FACTS] if any(step.compare or step.nodes for step in self.steps) else []
        return Order(checks=[*self.selected, *facts], profile=self.options.profile)

    def asked(self, found: Sequence[Finding]) -> list[Finding]:
        """Return the findings of a step that were asked for."""
        return [finding for finding in found if finding.check in self.between]

    def compared(self, nodes: Sequence[NodeReport]) -> list[Finding]:
        """Compare nodes. Pure as the steps are."""
        found: list[Finding] = []
        for step in self.steps:
            if step.compare is not None:
                found += self.asked(step.compare(nodes))
        return found

    @property
    def whys(self) -> dict[str, str]:
        """Why each check matters."""
        every = [*self.checks, *(one for step in self.steps for one in step.checks)]
        return {one.id: one.why for one in every}
