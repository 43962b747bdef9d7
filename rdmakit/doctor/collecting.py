"""What a directory of a machine's files must hold so that the checks can judge it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rdmakit.discovery.machine import Found
from rdmakit.doctor.catalog import CHECKS
from rdmakit.doctor.context import Context, settings
from rdmakit.doctor.run import run_checks
from rdmakit.drivers.host import HostTree

__all__ = ["read_for_checks"]


def read_for_checks(found: Found, tree: HostTree, outputs: Mapping[str, str]) -> None:
    """Run every check on a machine, for what it reads of ``tree``, and drop what it finds. Local.

    Handed to :func:`rdmakit.discovery.collect.collect`, whose tree remembers what is read: so
    the files that are kept are always those that the checks need.
    """
    context = Context(tree, found.machine, found.texts, settings(), live=False, outputs=outputs)
    for _ in run_checks(CHECKS, context):
        pass
