"""Server of agent.py on each emulated machine: one shell for each connection.

An answer is frames of kind (1 stdout, 2 stderr, 0 the status), length and bytes.
"""

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

PORT = 514
LATE_SECONDS = 1.0  # for the output of a command that has ended, as background processes keep it
LOGIN = {
    "HOME": "/root",
    "USER": "root",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


def send(connection: socket.socket, kind: int, data: bytes) -> None:
    connection.sendall(struct.pack("!BI", kind, len(data)) + data)


def relay(connection: socket.socket, child: "subprocess.Popen[bytes]") -> None:
    """Send the output until it is at its end; a caller that has gone takes the command along."""
    waits = selectors.DefaultSelector()
    assert child.stdout is not None
    assert child.stderr is not None
    waits.register(child.stdout, selectors.EVENT_READ, 1)
    waits.register(child.stderr, selectors.EVENT_READ, 2)
    waits.register(connection, selectors.EVENT_READ, 0)
    ended = 0.0
    while len(waits.get_map()) > 1:
        for key, _ in waits.select(0.2):
            data = os.read(key.fd, 65536)
            if data:
                send(connection, key.data, data)
            elif key.data:
                waits.unregister(key.fileobj)
            else:
                raise ConnectionResetError
        if child.poll() is not None:
            ended = ended or time.monotonic()
            if time.monotonic() > ended + LATE_SECONDS:
                return


def serve(connection: socket.socket) -> None:
    with connection:
        text = json.loads(connection.makefile("rb").readline())
        with subprocess.Popen(
            ["/bin/sh", "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/root",
            env=LOGIN,
            start_new_session=True,
        ) as child:
            try:
                relay(connection, child)
                send(connection, 0, struct.pack("!i", child.wait()))
            except OSError:
                os.killpg(child.pid, signal.SIGKILL)


def main() -> None:
    server = socket.create_server(("0.0.0.0", PORT), backlog=16)
    Path("/run/rdma-hosts/agentd").touch()
    while True:
        connection, _ = server.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
