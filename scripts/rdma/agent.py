"""As ssh is called: agent [OPTION...] HOST TEXT... runs the text on that emulated machine.

Prints its output as it comes and ends with its status. When this process ends, so does that.
"""

import json
import os
import socket
import struct
import sys
import time

PORT = 514
WITH_VALUE = set("BbcDEeFIiJLlmOoPpQRSWw")  # ssh's options that take one
SECONDS = 20.0


def arguments(words: list[str]) -> tuple[str, str]:
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if len(option) == 2 and option[1] in WITH_VALUE:
            del words[:1]
    if len(words) < 2:
        sys.exit("agent: expected a host and a command")
    return words[0], " ".join(words[1:])


def connect(host: str) -> socket.socket:
    end = time.monotonic() + SECONDS
    while True:
        try:
            connection = socket.create_connection((host, PORT), timeout=5)
        except OSError as exc:
            if time.monotonic() > end:
                sys.exit(f"agent: no answer from {host}: {exc}")
            time.sleep(0.1)
        else:
            connection.settimeout(None)
            return connection


def main() -> int:
    host, text = arguments(sys.argv[1:])
    connection = connect(host)
    connection.sendall(json.dumps(text).encode() + b"\n")
    stream = connection.makefile("rb")
    while head := stream.read(5):
        kind, nbytes = struct.unpack("!BI", head)
        data = stream.read(nbytes)
        if kind == 0:
            status: int = struct.unpack("!i", data)[0]
            return status if status >= 0 else 128 - status
        while data:
            data = data[os.write(kind, data) :]
    sys.exit(f"agent: {host} broke the connection off")


if __name__ == "__main__":
    sys.exit(main())
