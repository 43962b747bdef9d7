"""Whether the nodes of a job reach each other on the addresses that UCX's tcp would take.

Every node listens on its addresses and connects to those of the others: a word, then more bytes
than a packet holds, both ways. A packet filter, a wrong interface, an address that several
hosts have and an MTU that a switch does not take are told apart by what happens.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from rdmakit.doctor.model import Finding
from rdmakit.doctor.node_facts import NodeFacts
from rdmakit.doctor.reach_findings import Outcome, Place, reach_findings
from rdmakit.protocols import Bootstrap

__all__ = ["Endpoint", "endpoints_of", "measure_clocks", "port_range", "reach"]

_TOKEN = 16
_WORD = 64
_LARGE = 128 << 10
"""Bytes: many packets at any MTU, and little on any link."""
_AT_ONCE = 16
"""Connections that a node makes at the same time."""
_MOST = 48
"""Nodes of which each pair is tried; of more, each tries those at distances 1, 2, 4, ..."""


class Endpoint(msgspec.Struct, frozen=True):
    """An address of a node."""

    interface: str
    address: str
    prefix: int = 32
    mtu: int | None = None


class _Offer(msgspec.Struct, frozen=True):
    """What a node tells the others before they connect."""

    host: str
    token: str
    boot_id: str
    endpoints: list[tuple[Endpoint, int]]
    """With the port that listens there; 0: none does."""


def endpoints_of(facts: NodeFacts, most: int = 1) -> list[Endpoint]:
    """Return a node's addresses that UCX's tcp would take, its first choice first. Pure."""
    return [
        Endpoint(name, facts.addresses[name], facts.prefixes.get(name, 32), facts.mtus.get(name))
        for name in facts.tcp[:most]
        if name in facts.addresses
    ]


def reach(
    bootstrap: Bootstrap,
    host: str,
    endpoints: Sequence[Endpoint],
    *,
    boot_id: str = "",
    seconds: float = 3.0,
    ports: Sequence[int] = (0,),
) -> list[Finding]:
    """Return which nodes do not reach each other, and why. Collective, blocking.

    One rank of each node calls it. With n nodes each makes n-1 connections, 16 at a time, each for
    ``seconds`` at most; with more than 48 nodes, about log2(n) connections.

    Args:
        bootstrap: control plane of these ranks. It must not need the way that is tried.
        host: this node's name.
        endpoints: this node's addresses (see :func:`endpoints_of`); none: it is left out.
        boot_id: tells hosts apart; parts of one host are not tried.
        seconds: how long one answer is awaited.
        ports: to listen on, the first that is free (see :func:`port_range`); 0: any.

    Returns:
        Findings of ``net.reach``, equal on all ranks; ``ok`` alone where all is well.
    """
    token = secrets.token_bytes(_TOKEN)
    with contextlib.ExitStack() as stack:
        listening = [
            (one, stack.enter_context(_listen(one, token, seconds, ports))) for one in endpoints
        ]
        offer = _Offer(host, token.hex(), boot_id, listening)
        told = [
            msgspec.json.decode(text, type=_Offer)
            for text in bootstrap.allgather(msgspec.json.encode(offer))
        ]
        outcomes = _try_all(bootstrap.rank, told, seconds)
        # Also keeps every node's doors open until nobody knocks any more.
        answers = [
            msgspec.json.decode(text, type=list[Outcome])
            for text in bootstrap.allgather(msgspec.json.encode(outcomes))
        ]
    places = [Place(own.host, bool(own.endpoints)) for own in told]
    return reach_findings(places, [one for own in answers for one in own], seconds)


def port_range(environ: Mapping[str, str]) -> Sequence[int]:
    """Return the ports that UCX listens on by UCX_TCP_PORT_RANGE, which a firewall may let pass."""
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", environ.get("UCX_TCP_PORT_RANGE", "").strip())
    if match is None:
        return (0,)
    return range(int(match[1]), min(int(match[2]), 65535) + 1) or (0,)


def measure_clocks(bootstrap: Bootstrap, rounds: int = 5) -> list[float]:
    """Return how many seconds each rank's clock is ahead of rank 0's. Collective, blocking.

    Right to the time of an all-gather, which is the last thing that happens before the clocks
    are read: the median of ``rounds``. Equal on all ranks.
    """
    reads = []
    for _ in range(rounds):
        bootstrap.allgather(b"")
        now = bootstrap.allgather(struct.pack("d", time.time()))
        reads.append([struct.unpack("d", text)[0] for text in now])
    offsets = [sorted(read[rank] - read[0] for read in reads) for rank in range(bootstrap.size)]
    return [own[len(own) // 2] for own in offsets]


# -- the side that listens ----------------------------------------------------------------------


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    # Its threads end by their own deadlines; nobody waits for them.
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, port: int, token: bytes, seconds: float) -> None:
        # Longer than the caller waits: who gives up first is who tells of it.
        self.token, self.seconds = token, 3 * seconds
        super().__init__((address, port), _Answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a caller that went away tells of it itself."""


class _Answer(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answer a word with the token, take many bytes, then send as many."""
        door: socket.socket = self.request
        door.settimeout(self.server.seconds)
        _take(door, _WORD, self.server.seconds)
        door.sendall(self.server.token)
        _take(door, _LARGE, self.server.seconds)
        door.sendall(self.server.token)
        door.sendall(bytes(_LARGE))
        with contextlib.suppress(OSError):
            door.recv(1)  # until the other side has it all and closes


@contextlib.contextmanager
def _listen(
    endpoint: Endpoint, token: bytes, seconds: float, ports: Sequence[int]
) -> Iterator[int]:
    """Listen on an address; yield the port, 0 where the address is not this host's."""
    server = None
    for port in ports:
        try:
            server = _Server(endpoint.address, port, token, seconds)
            break
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                break
    if server is None:
        yield 0
        return
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


# -- the side that connects -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """A connection to be made."""

    source: int
    peer: int
    own: Endpoint
    to: Endpoint
    port: int
    token: bytes


def _peers(rank: int, size: int) -> list[int]:
    """Return whom a node tries: all, each node another one at a time; of many, a sample."""
    if size <= _MOST:
        return [(rank + step) % size for step in range(1, size)]
    steps = [1 << power for power in range(size.bit_length()) if 1 << power < size]
    return [(rank + step) % size for step in steps]


def _try_all(rank: int, told: Sequence[_Offer], seconds: float) -> list[Outcome]:
    own = told[rank]
    ways = [
        way
        for peer in _peers(rank, len(told))
        if not (own.boot_id and own.boot_id == told[peer].boot_id)
        for way in _ways(rank, peer, own, told[peer])
    ]
    if not ways:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(ways))) as pool:
        return list(pool.map(lambda way: _try(way, seconds), ways))


def _ways(rank: int, peer: int, own: _Offer, other: _Offer) -> Iterator[_Way]:
    """Yield the ways to a node: to each address whose subnet this node is in, else to the first."""
    token = bytes.fromhex(other.token)
    mine = [endpoint for endpoint, _ in own.endpoints]
    if not mine:
        return
    pairs = [
        (next((one for one in mine if _network(one) == _network(to)), None), to, port)
        for to, port in other.endpoints
    ]
    near = [(one, to, port) for one, to, port in pairs if one is not None]
    if not near and other.endpoints:
        near = [(mine[0], *other.endpoints[0])]
    for one, to, port in near:
        yield _Way(rank, peer, one, to, port, token)


def _network(endpoint: Endpoint) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(f"{endpoint.address}/{endpoint.prefix}", strict=False)


def _try(way: _Way, seconds: float) -> Outcome:
    def outcome(kind: str, detail: str = "") -> Outcome:
        return Outcome(
            way.source,
            way.peer,
            way.own.interface,
            way.own.address,
            way.to.interface,
            way.to.address,
            kind,
            detail,
            way.own.mtu,
            way.to.mtu,
        )

    if way.to.address == way.own.address:
        return outcome("same")
    if not way.port:
        return outcome("deaf")
    step = "silent"
    try:
        with socket.create_connection(
            (way.to.address, way.port), seconds, (way.own.address, 0)
        ) as door:
            door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            door.settimeout(seconds)
            step = "mute"
            door.sendall(bytes(_WORD))
            if _take(door, _TOKEN, seconds) != way.token:
                return outcome("stranger")
            step = "large-out"
            door.sendall(bytes(_LARGE))
            _take(door, _TOKEN, seconds)
            step = "large-back"
            _take(door, _LARGE, seconds)
    except TimeoutError:
        return outcome(step)
    except ConnectionRefusedError:
        return outcome("refused")
    except OSError as exc:
        kind = "unreachable" if step == "silent" else "broken"
        return outcome(kind, exc.strerror or str(exc))
    return outcome("ok")


def _take(door: socket.socket, nbytes: int, seconds: float) -> bytes:
    """Return exactly so many bytes.

    Raises:
        TimeoutError: they did not all come within ``seconds``.
        OSError: the other side closed before.
    """
    end = time.monotonic() + seconds
    parts, missing = [], nbytes
    while missing:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        door.settimeout(left)
        part = door.recv(min(missing, 1 << 16))
        if not part:
            raise ConnectionResetError(0, "the other side closed the connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
