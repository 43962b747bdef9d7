"""Proof of the path that bytes take between two ranks.

``prove_path`` collects evidence and judges it; ``fulfils`` says whether a report meets a demand,
``describe`` puts it into words.
"""

from rdmakit.proof.evidence import Evidence, PairProof, PathReport, Verdict
from rdmakit.proof.judge import judge
from rdmakit.proof.prove import prove_path
from rdmakit.proof.words import REQUIREMENTS, describe, fulfils, paths

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
