"""driver.py FOLDER, on node0: runs the steps of FOLDER/steps.json, writes FOLDER/NAME.json each.

The packet counters of both machines' RDMA devices are read around each step. Standard library
only: nothing of the product may be needed to judge it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

AGENT = "/run/rdma-hosts/agent"
COUNTERS = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
MARK = "--- counters"
SMALL_SECONDS = 60.0
"""For commands around a step and for the counters."""


def on(node: int, text: str) -> tuple[int, str]:
    """Run shell commands on a machine."""
    words = ["/bin/sh", "-c", text] if node == 0 else [AGENT, f"node{node}", text]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMALL_SECONDS,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end within {SMALL_SECONDS:g} s"
    return done.returncode, done.stdout


def around(commands: list[tuple[int, str]]) -> tuple[list[dict[str, int]], list[str]]:
    """Run the commands of each machine, then read its counters: one call for each machine."""
    counters, problems = [], []
    for node in (0, 1):
        own = [f"( {text}\n)" for where, text in commands if where == node]
        read = f"grep -H . {COUNTERS}/*_pkts"
        status, out = on(node, " && ".join([*own, f"echo '{MARK}'", read]))
        said, _, values = out.partition(MARK + "\n")
        if status:
            problems.append(f"node{node}: status {status}: {said or out}")
        found = [line.rpartition("/")[2].split(":") for line in values.splitlines() if ":" in line]
        counters.append({name: int(value) for name, value in found})
    return counters, problems


def run(words: list[str], env: dict[str, str], seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    with subprocess.Popen(
        words,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(timeout=seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
            # mpirun ends its ranks on both machines when it is asked to.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            try:
                out, err = child.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                out, err = child.communicate()
    return {
        "rc": child.returncode,
        "timed_out": timed_out,
        "out": out.decode(errors="replace"),
        "err": err.decode(errors="replace"),
        "seconds": round(time.monotonic() - start, 2),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    for step in json.loads((folder / "steps.json").read_text()):
        before, problems = around(step["before"])
        result: dict[str, Any] = {
            "rc": None,
            "timed_out": False,
            "out": "",
            "err": "",
            "seconds": 0,
        }
        if not problems:
            result = run(step["words"], step["env"], step["seconds"])
        after, more = around([])
        restored = around(step["after"])[1] if step["after"] else []
        result |= {"before": before, "after": after, "problems": [*problems, *more, *restored]}
        path = folder / f"{step['name']}.json"
        path.write_text(json.dumps(result))
        print(f"{step['name']}: status {result['rc']}, {result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
