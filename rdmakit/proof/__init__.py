"""Proof of the path that bytes take between two ranks.

``prove_path`` collects evidence and judges it; ``fulfils`` says whether a report meets a demand,
``describe`` puts it into words. What only reads or words a report does not load the communicator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rdmakit.proof.evidence import Evidence, PairProof, PathReport, Verdict
from rdmakit.proof.judge import judge
from rdmakit.proof.words import REQUIREMENTS, describe, fulfils, paths

if TYPE_CHECKING:
    from rdmakit.proof.prove import prove_path

__all__ = [
    "REQUIREMENTS",
    "Evidence",
    "PairProof",
    "PathReport",
    "Verdict",
    "describe",
    "fulfils",
    "judge",
    "paths",
    "prove_path",
]


def __getattr__(name: str) -> Any:
    """Load ``prove_path`` at first use."""
    if name != "prove_path":
        raise AttributeError(f"module 'rdmakit.proof' has no attribute {name!r}")
    value = importlib.import_module("rdmakit.proof.prove").prove_path
    globals()[name] = value
    return value
