"""Every call of mpi4py's communicators is served, refused by name, or no matter of arrays."""

from __future__ import annotations

import ast
from importlib import metadata

from rdmakit import Communicator
from rdmakit.refused import REFUSED, Refused

OTHERS = {
    # between groups, and processes that are started later
    "Accept", "Connect", "Create_from_group", "Create_intercomm", "Disconnect", "Get_parent",
    "Join", "Spawn", "Spawn_multiple",
    # ranks that may fail
    "Ack_failed", "Agree", "Get_failed", "Iagree", "Is_revoked", "Ishrink", "Revoke", "Shrink",
    # buffers of Bsend, which is refused
    "Attach_buffer", "Detach_buffer", "Flush_buffer", "Iflush_buffer",
    # attributes, names, hints, errors and handles of MPI's own
    "Call_errhandler", "Compare", "Create_errhandler", "Create_keyval", "Delete_attr",
    "Free_keyval", "Get_attr", "Get_errhandler", "Get_info", "Get_name", "Is_inter", "Is_intra",
    "Set_attr", "Set_errhandler", "Set_info", "Set_name", "f2py", "free", "fromhandle", "fromint",
    "group", "handle", "info", "is_inter", "is_intra", "is_topo", "name", "py2f", "toint",
    "topology",
}  # fmt: skip
"""What ``comm.mpi`` is for."""


def names_of_mpi4py() -> set[str]:
    """Return the public methods and properties of its Comm and Intracomm, out of its stubs."""
    stub = next(f for f in metadata.files("mpi4py") or [] if f.name == "MPI.pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    bodies = [
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("Comm", "Intracomm")
    ]
    assert len(bodies) == 2
    functions = (node.name for body in bodies for node in body if isinstance(node, ast.FunctionDef))
    return {name for name in functions if not name.startswith("_")}


def test_no_call_is_unknown() -> None:
    unknown = {name for name in names_of_mpi4py() - OTHERS if not hasattr(Communicator, name)}
    assert not unknown, sorted(unknown)


def test_what_is_left_to_mpi_is_neither_served_nor_refused() -> None:
    assert not [name for name in OTHERS if hasattr(Communicator, name)]


def test_nothing_that_is_served_is_refused() -> None:
    for base in Communicator.__mro__:
        if base is not Refused:
            assert not set(vars(base)) & set(REFUSED), base
