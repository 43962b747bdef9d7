"""What two ranks do in tests/parallel/test_nics.py: nics.py MODE..."""

from __future__ import annotations

import os
import sys

import numpy as np

from rdmakit import Communicator, Config, assembly
from rdmakit.bench.environment import environment
from rdmakit.inter.ucx import UcxChannel, offered_devices

CONFIG = Config(ranks_per_node=1, timeout=30)


def channel_of(comm: Communicator) -> UcxChannel:
    """Return the channel, after a call that moved bytes over it."""
    x = np.full(1000, comm.rank + 1.0, np.float32)
    y = np.empty_like(x)
    comm.Allreduce(x, y)
    assert (y == sum(range(1, comm.size + 1))).all()
    assert isinstance(comm.channel, UcxChannel), comm.notes
    return comm.channel


def plain() -> None:
    """Without RDMA nothing is chosen, and what looks at machines is not even imported."""
    with Communicator(config=CONFIG) as comm:
        channel = channel_of(comm)
        assert "NET_DEVICES" not in channel.config, channel.config
        assert channel.net_devices == ()
        assert not any("network devices" in note for note in comm.notes), comm.notes
        assert not {"rdmakit.machines", "rdmakit.topology.placement"} & set(sys.modules)


def given(*devices: str) -> Communicator:
    """Return a communicator for which ``devices`` were chosen."""
    assembly.choose_nics = lambda *_, **__: (devices, ("chosen",))
    return Communicator(config=CONFIG)


def confined() -> None:
    """The context has the devices, the connections use them, the results name them."""
    with Communicator(config=CONFIG) as comm:
        used = sorted({own for _, own in channel_of(comm).transports(1 - comm.rank)})[0]
        used = comm.mpi.bcast(used)
    offered = offered_devices("auto", virtual=True)
    assert used in offered
    assert len(offered) > 1, "one device alone shows no difference"
    with given(used, used) as comm:
        channel = channel_of(comm)
        assert channel.config["NET_DEVICES"] == channel.effective["NET_DEVICES"] == used
        assert {own for _, own in channel.transports(1 - comm.rank)} == {used}
        told = environment(comm)
        assert told["ucx"]["net_devices"] == [used, used]
        assert "chosen" in told["notes"]


def useless() -> None:
    """Devices that do not reach the others are given up on both ranks; UCX still serves."""
    for devices in (("no_0:1", "no_0:1"), ("all", "no_0:1")):
        with given(*devices) as comm:
            channel = channel_of(comm)
            assert "NET_DEVICES" not in channel.config
            assert channel.net_devices == ()
            assert any("these network devices did not serve" in note for note in comm.notes)


if __name__ == "__main__":
    for mode in sys.argv[1:]:
        globals()[mode]()
        os.write(1, f"end {mode}\n".encode())
