"""``rdmakit topo`` on ranks that are told to be two hosts, which differ in one fact."""

from __future__ import annotations

import os
import sys

from rdmakit.cli import main

rank = int(os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK", "0")))
os.environ["RDMAKIT_NODE_ID"] = f"host{rank // 2}"
os.environ["container"] = "lxc" if rank // 2 else "podman"  # noqa: SIM112 - its name
if rank == 1:
    os.environ["UCX_NET_DEVICES"] = "^mlx5_0"
main(["topo", *sys.argv[1:]])
