"""A channel over UCX tag messages, through UCXX's synchronous core API.

Worker addresses travel by the bootstrap; endpoints are made at first use, with UCX's error
handling, so that a dead peer is seen. Memory of messages that were given up stays alive until
the process ends: UCX cannot take a send back, and a late peer may still write a receive.

Teardown: barrier (nobody sends any more), endpoints, worker, context, then MPI_Finalize.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rdmakit.drivers import ucx_loading
from rdmakit.errors import (
    ConnectError,
    PeerLost,
    TransferTimeout,
    TransportError,
    UnsupportedError,
)
from rdmakit.inter.tags import (
    COMMUNICATORS,
    MESSAGES,
    SOURCES,
    TagKind,
    pack,
    source_of,
    with_source,
)
from rdmakit.protocols import Arrived, Bootstrap, Bytes, Request
from rdmakit.waiting import Waiter, greet_seconds, settle

__all__ = ["UcxChannel", "context_config", "offered_devices"]

_QUARANTINE: list[object] = []
"""Requests and memory of transfers that were given up."""

_LOCAL_TRANSPORTS = ("posix", "sysv", "cma", "xpmem", "knem")


_NETWORK = re.compile(r"^#\s+resource .* -- (?:tcp|rc_\w+|dc_\w+|ud_\w+|gga_\w+|srd)/(\S+)", re.M)


def context_config(*, virtual: bool, devices: str = "") -> dict[str, str]:
    """Return the UCX settings of the context that joins nodes; the user's own win.

    Args:
        virtual: nodes are parts of one host, between which nothing local may be used.
        devices: network devices to be confined to; empty: all.
    """
    config: dict[str, str] = {}
    named = os.environ.get("UCX_TLS", "all")
    local = {*_LOCAL_TRANSPORTS, "sm", "shm", "mm"}
    if virtual and named in ("all", ""):
        config["TLS"] = "^" + ",".join((*_LOCAL_TRANSPORTS[:3], "cuda_ipc"))
    elif virtual and named.startswith("^"):
        config["TLS"] = ",".join((named, *_LOCAL_TRANSPORTS[:3], "cuda_ipc"))
    elif virtual:
        kept = [name for name in named.split(",") if name not in local | {"cuda_ipc"}]
        config["TLS"] = ",".join(kept) or "tcp"
    for name, value in (
        # Measured over tcp: 5 times the rate of the default scheme between two processes.
        ("TCP_TX_SEG_SIZE", "256k"),
        ("TCP_RX_SEG_SIZE", "256k"),
        ("NET_DEVICES", devices),
    ):
        if value and f"UCX_{name}" not in os.environ:
            config[name] = value
    return config


def offered_devices(policy: str, *, virtual: bool) -> tuple[str, ...]:
    """Return the network devices that this process's UCX has, as NET_DEVICES takes them. Local.

    A UCX that is asked for a device that it lacks goes without, with a warning at most. Makes a
    context and drops it: milliseconds, and some more for each RDMA device.

    Args:
        policy: which UCX (see ``drivers.ucx_loading``).
        virtual: see :func:`context_config`.

    Raises:
        SetupError: no usable UCX here.
        ConnectError: UCX cannot make a context.
    """
    ucx_loading.load(policy)
    ucx, _ = ucx_loading.bindings()
    config = {**context_config(virtual=virtual), "NET_DEVICES": "all"}
    try:
        context = ucx.UCXContext(config_dict=config, feature_flags=(ucx.Feature.TAG,))
        return tuple(dict.fromkeys(_NETWORK.findall(context.info)))
    except Exception as exc:
        raise ConnectError(f"UCX cannot start with {config}: {exc}; see UCX_TLS") from exc


class _DevicePointer:
    """GPU memory as ucxx takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class _UcxRequest:
    """Completion of one ucxx request."""

    __slots__ = ("_request", "_what")

    def __init__(self, request: Any, what: str) -> None:
        self._request, self._what = request, what

    def done(self) -> bool:
        request = self._request
        if not request.completed:
            return False
        try:
            request.check_error()
        except Exception as exc:
            raise _mapped(exc, self._what) from exc
        return True


def _mapped(exc: Exception, what: str) -> TransportError:
    name = type(exc).__name__
    gone = ("ConnectionReset", "EndpointTimeout", "NotConnected", "Canceled", "Unreachable")
    kind = PeerLost if any(word in name for word in gone) else TransportError
    return kind(f"{what}: UCX says {name}: {exc}")


class UcxChannel:
    """See :class:`rdmakit.protocols.Channel`. Make it with :meth:`create`."""

    name = "ucx"
    way = "gpu-direct"
    messages = MESSAGES

    def __init__(
        self,
        rank: int,
        worker: Any,
        context: Any,
        addresses: Sequence[bytes],
        config: dict[str, str],
    ) -> None:
        self.rank, self.config = rank, config
        self._worker, self._context, self._addresses = worker, context, addresses
        self._ucx, arr = ucx_loading.bindings()
        self._array = arr.Array
        self._tag, self._mask = self._ucx.UCXXTag, self._ucx.UCXXTagMask
        self._endpoints: dict[int, Any] = {}
        self.address = b""
        """Of this rank's worker, for the others."""
        self.effective: dict[str, str] = {str(k): str(v) for k, v in context.config.items()}
        """UCX's settings as they are, ours and the user's taken in."""
        self._broken = False
        self.net_devices: tuple[str, ...] = ()
        """NET_DEVICES of each rank, where it was chosen for them."""
        self._guarded = True
        self._flushing = 0
        self.progress = worker.progress  # type: ignore[method-assign]
        self._tcp = any("tcp" in line and "resource" in line for line in context.info.splitlines())

    @classmethod
    def open(
        cls, rank: int, policy: str, *, virtual: bool, local: bool = False, devices: str = ""
    ) -> UcxChannel:
        """Make this rank's half: context and worker. Local; ``connect`` completes it.

        Args:
            rank: this rank in the job.
            policy: which UCX (see ``drivers.ucx_loading``).
            virtual: see :func:`context_config`.
            local: between ranks of one node: through shared memory and CUDA IPC, which know no
                error handling; UCX would take TCP with it.
            devices: see :func:`context_config`.

        Raises:
            SetupError: no usable UCX here.
            ConnectError: UCX cannot make a context or worker.
        """
        ucx_loading.load(policy)
        ucx, _ = ucx_loading.bindings()
        config = context_config(virtual=virtual, devices=devices)
        try:
            context = ucx.UCXContext(config_dict=dict(config), feature_flags=(ucx.Feature.TAG,))
            worker = ucx.UCXWorker(context)
            channel = cls(rank, worker, context, (), config)
            channel._guarded = not local
            channel.address = worker.address.tobytes()
        except Exception as exc:
            raise ConnectError(
                f"UCX cannot start with {config or 'its defaults'}: {exc}; see UCX_TLS and "
                "UCX_NET_DEVICES"
            ) from exc
        return channel

    @classmethod
    def create(cls, bootstrap: Bootstrap, policy: str, *, virtual: bool) -> UcxChannel:
        """Make the channel of all ranks; they must all succeed. Collective, blocking."""
        channel = cls.open(bootstrap.rank, policy, virtual=virtual)
        channel.connect(bootstrap.allgather(channel.address))
        return channel

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Take the worker addresses of all ranks of the job. Local."""
        self._addresses = addresses

    def greet(self, peers: Sequence[int], waiter: Waiter) -> None:
        """Exchange a word with each of ``peers``, who do the same. Blocking.

        Learns at once whether UCX has a way to them and whether it lets bytes through, and
        leaves no half-made connection behind, for which a flush would wait.

        Raises:
            ConnectError: there is none, or nothing came within the deadline.
        """
        out, into = np.full(8, self.rank % 256, np.uint8), np.zeros((len(peers), 8), np.uint8)
        tag = pack(COMMUNICATORS - 1, TagKind.POINT_TO_POINT, 0)
        requests: list[Request] = []
        keep = (out, into)

        def silent() -> str:
            missing = [p for p, r in zip(peers, requests, strict=False) if not r.done()]
            return f"no word through UCX from rank(s) {missing or list(peers)}"

        limit = greet_seconds(waiter.timeout)
        try:
            requests += [self.recv(p, self.wrap(into[i]), tag) for i, p in enumerate(peers)]
            requests += [self.send(peer, self.wrap(out), tag) for peer in peers]
            waiter.until(lambda: all(r.done() for r in requests), (self.progress,), silent, limit)
            settle(self.flush, self.progress)
        except BaseException as exc:
            self.abandon(requests, keep)
            if isinstance(exc, TransferTimeout | PeerLost):
                raise ConnectError(
                    f"{exc}: a firewall, or an interface that does not lead there "
                    "(UCX_NET_DEVICES)?"
                ) from exc
            raise

    def wrap(self, data: Bytes) -> Any:
        """Return UCXX's handle of the memory."""
        return self._array(data)

    def wrap_device(self, address: int, nbytes: int) -> Any:
        """Return UCXX's handle of GPU memory.

        Raises:
            UnsupportedError: this UCX has no CUDA; a device pointer would end the process.
        """
        if self.why_no_device:
            raise UnsupportedError(self.why_no_device)
        return self._array(_DevicePointer(address, nbytes))

    @property
    def why_no_device(self) -> str:
        """Why this channel takes no GPU memory, or nothing."""
        library = ucx_loading.loaded()
        if library.has_cuda:
            return ""
        tried = [m for m in library.modules if m.name == "libuct_cuda"]
        return (
            f"UCX {library.version} of {library.libraries.get('libucp', '?')} has no CUDA support: "
            + (tried[0].error if tried else "install rdmakit[cuda12] or rdmakit[cuda13]")
        )

    def _endpoint(self, peer: int) -> Any:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            try:
                endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                    self._worker,
                    self._ucx.UCXAddress.create_from_buffer(self._addresses[peer]),
                    endpoint_error_handling=self._guarded,
                )
            except Exception as exc:
                raise ConnectError(
                    f"rank {self.rank} cannot reach rank {peer} through UCX: {exc}; see UCX_TLS "
                    "and UCX_NET_DEVICES"
                ) from exc
            self._endpoints[peer] = endpoint
        return endpoint

    def send(self, peer: int, handle: Any, tag: int) -> Request:
        """Start sending."""
        endpoint = self._endpoints.get(peer) or self._endpoint(peer)
        try:
            request = endpoint.tag_send(handle, self._tag(with_source(tag, self.rank)))
        except Exception as exc:
            raise _mapped(exc, f"send to rank {peer}") from exc
        return _UcxRequest(request, f"send to rank {peer}")

    def recv(self, peer: int, handle: Any, tag: int) -> Request:
        """Start receiving; makes the endpoint too, so that the peer's end is seen."""
        if peer not in self._endpoints:
            self._endpoint(peer)
        request = self._worker.tag_recv(handle, self._tag(with_source(tag, peer)))
        return _UcxRequest(request, f"receive from rank {peer}")

    def arrived(self, tag: int, mask: int) -> Arrived | None:
        """Take a message out of UCX's matching."""
        worker = self._worker
        found = worker.tag_probe(self._tag(tag), self._mask(mask), True)
        if not found.matched:
            return None
        whole: int = found.sender_tag.value
        source = source_of(whole)

        def receive(data: Bytes) -> Request:
            if source not in self._endpoints:
                self._endpoint(source)
            request = worker.tag_recv_with_handle(self._array(data), found)
            return _UcxRequest(request, f"receive from rank {source}")

        def receive_device(address: int, nbytes: int) -> Request:
            if source not in self._endpoints:
                self._endpoint(source)
            request = worker.tag_recv_with_handle(self.wrap_device(address, nbytes), found)
            return _UcxRequest(request, f"receive from rank {source}")

        return Arrived(
            source,
            whole & ~with_source(0, SOURCES - 1),
            found.length,
            receive,
            receive_device=receive_device,
        )

    def progress(self) -> None:
        """Move messages along."""
        self._worker.progress()

    def flush(self) -> bool:
        """Return whether the worker holds no unsent bytes; RDMA transports never do."""
        if not self._tcp or self._broken or self._worker is None:
            return True
        if self._flushing:  # an earlier one says nothing of what was sent since
            if not ucx_loading.flushed(self._flushing):
                return False
            self._flushing = 0
        self._flushing = ucx_loading.start_flush(self._worker.handle)
        if self._flushing and ucx_loading.flushed(self._flushing):
            self._flushing = 0
        return not self._flushing

    @property
    def holds(self) -> bool:
        """Whether the last flush was given up."""
        return bool(self._flushing) and not self._broken

    def check_peers(self) -> None:
        """Raise PeerLost if UCX reports an endpoint as failed."""
        for peer, endpoint in self._endpoints.items():
            if not endpoint.alive:
                self._broken = True
                raise PeerLost(
                    f"rank {self.rank}: UCX reports the connection to rank {peer} as failed; "
                    "that rank has ended or its link is down"
                )

    def transports(self, peer: int) -> Sequence[tuple[str, str]]:
        """Return (transport, device) of each lane to ``peer``; nothing before first use."""
        endpoint = self._endpoints.get(peer)
        return ucx_loading.endpoint_transports(endpoint.handle) if endpoint is not None else ()

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """Keep requests and memory until the process ends."""
        self._broken = True
        _QUARANTINE.extend((requests, keep, self._endpoints, self._worker, self._context))

    def close(self) -> None:
        """Close endpoints, worker and context, in this order; idempotent."""
        if self._worker is None:
            return
        endpoints, self._endpoints = self._endpoints, {}
        worker, self._worker = self._worker, None
        context, self._context = self._context, None
        self.__dict__.pop("progress", None)
        if self._broken:
            _QUARANTINE.extend((endpoints, worker, context))
            return
        for endpoint in endpoints.values():
            with contextlib.suppress(Exception):
                endpoint.close_blocking(period=10_000_000, max_attempts=1)
        del endpoints
        del worker
        del context
