"""What is known of the way that bytes took, and what was made of it: plain data, ready for JSON.

Schema ``rdmakit.proof/1``.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "PATHS",
    "SCHEMA",
    "UNPROVEN",
    "ChildResult",
    "Evidence",
    "Hello",
    "Lane",
    "Moved",
    "Order",
    "PairProof",
    "PathReport",
    "Registration",
    "TableUse",
    "Variant",
    "Verdict",
    "WindowCheck",
]

SCHEMA = "rdmakit.proof/1"
UNPROVEN = "unproven"
PATHS = (
    "gdr-peermem",
    "gdr-dmabuf",
    "rdma-host",
    "host-staged",
    "cuda-ipc",
    "cuda-copy",
    "shm",
    "tcp",
)
"""What can be proven."""

Lane = tuple[str, str]
"""Transport and device, as UCX names them."""


class Order(msgspec.Struct, frozen=True):
    """What a child is to do."""

    role: int
    """0 sends, 1 receives."""
    policy: str
    virtual: bool
    devices: str
    memory: str
    ordinal: int
    """GPU, where ``memory`` is ``gpu``."""
    nbytes: int
    messages: int
    seconds: float


class Hello(msgspec.Struct, frozen=True):
    """A child's first word."""

    address: str
    version: str
    library: str


class ChildResult(msgspec.Struct, frozen=True):
    """A child's last word."""

    seconds: float
    messages: int
    lanes: tuple[Lane, ...]
    dmabuf: str = ""
    """UCX_CUDA_COPY_DMABUF where it is set."""


class TableUse(msgspec.Struct, frozen=True, kw_only=True):
    """The row of UCX's protocol tables that a message of the size falls in."""

    operation: str
    """As in the table: ``tagged message by ucp_tag_send*(multi)``."""
    memory: str
    """``host`` or ``cuda``; as the table names it."""
    text: str
    """UCX's words for the protocol."""
    lanes: tuple[tuple[str, str, int], ...]
    """Transport, device and share in per cent."""
    certain: bool
    """False where UCX marks it as an estimate and no other table settles it."""
    side: str
    """Whose table: ``sender`` or ``receiver``."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the pair of children."""

    name: str
    """``default``, ``gdr-off``, ``dmabuf-off`` or ``host``."""
    setting: str = ""
    memory: str = "host"
    GBps: float | None = None
    uses: tuple[TableUse, ...] = ()
    """Of the sender's and of the receiver's tables, as far as they were printed."""
    same_library: bool = True
    """Whether the children's UCX is the file that the ranks use."""
    dmabuf: str = ""
    problem: str = ""
    """Why there is nothing."""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What one port counted in one direction while the messages went."""

    rank: int
    side: str
    """``sender`` (what it sent counts) or ``receiver`` (what it received counts)."""
    kind: str
    """``rdma`` or ``net``."""
    port: str
    """``mlx5_0:1`` or ``eth0``, as lanes name it."""
    unit: str
    """``bytes`` or ``packets`` of at most ``mtu`` bytes."""
    source: str
    during: int = 0
    """Counted while the messages went, in units."""
    idle: int = 0
    """Counted in a pause of the same length, in units."""
    mtu: int = 0
    carried: int = 0
    """Bytes that the messages account for: during less idle; of packets as if they were full."""
    state: str
    """``agrees``, ``nothing``, ``too few``, ``too many``, ``busy`` or ``unknown``."""
    others: bool = False
    """Whether the pause shows traffic that is not ours."""
    note: str = ""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a NIC's driver takes the very memory of the messages."""

    rank: int
    side: str
    device: str = ""
    peermem: bool | None = None
    """ibv_reg_mr on the address; None: could not be tried."""
    peermem_note: str = ""
    dmabuf: bool | None = None
    """ibv_reg_dmabuf_mr on a file descriptor of the memory; None: could not be tried."""
    dmabuf_note: str = ""


class WindowCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Inside a node: whether one rank's window is the other's own memory."""

    kind: str
    """``shm``, ``cuda-ipc``, or ``host-staged``."""
    same: bool
    note: str = ""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found out about one pair."""

    memory: str
    """``host`` or ``gpu``: where the messages lay."""
    nbytes: int
    """Of one message."""
    sent: int = 0
    """Bytes of all messages that the counters are held against."""
    messages: int = 0
    seconds: float = 0.0
    inside: bool = False
    """Whether both ranks are in one node, where a window carries the bytes."""
    one_stack: bool = False
    """Whether both ranks have one network stack: one host, one network namespace."""
    virtual: bool = False
    """Whether the two nodes are parts of one host."""
    channel: str = ""
    staged: str = ""
    """Why rdmakit itself sends this GPU memory through pinned host memory; empty: it does not."""
    sender_lanes: tuple[Lane, ...] = ()
    receiver_lanes: tuple[Lane, ...] = ()
    counters: tuple[Moved, ...] = ()
    variants: tuple[Variant, ...] = ()
    registrations: tuple[Registration, ...] = ()
    window: WindowCheck | None = None
    wrong: int | None = None
    """Bytes that did not arrive as they were sent; None: not looked at."""
    problems: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the evidence."""

    path: str
    """One of ``PATHS``, or ``unproven``."""
    carrier: str = ""
    """With ``host-staged`` between nodes: ``rdma`` or ``tcp``."""
    reasons: tuple[str, ...] = ()
    """What speaks for it; of ``unproven``: what there is all the same."""
    missing: tuple[str, ...] = ()
    """Of ``unproven``: what a proof lacks."""
    disagreements: tuple[str, ...] = ()
    """Evidence that contradicts other evidence."""


class PairProof(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of ranks; the first one sends."""

    first: int
    second: int
    hosts: tuple[str, str]
    verdict: Verdict
    evidence: Evidence


class PathReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``prove_path`` returns; equal on all ranks."""

    schema: str = SCHEMA
    memory: str
    nbytes: int
    pairs: tuple[PairProof, ...]
    sample: str = ""
    """What was left out of the pairs; empty: nothing."""
