"""Small outputs of other tools, in the shapes that occur in the wild."""

from __future__ import annotations

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect (e.g., QPI/UPI)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
"""
NVLINK = "  NV#  = Connection traversing a bonded set of # NVLinks\n"
NAMES = "\nNIC Legend:\n\n  NIC0: mlx5_3\n  NIC1: mlx5_bond_0\n"

TABS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tPIX\tSYS\t0-7,16-23\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tPXB\t8-15,24-31\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
)
OLD = (
    "        GPU0    GPU1    mlx4_0  CPU Affinity\n"
    "GPU0     X      PHB     SOC     0-5\n"
    "GPU1    PHB      X      PHB     6-11\n"
    "mlx4_0  SOC     PHB      X \n"
    "\nLegend:\n\n  X   = Self\n  SOC = Path traverses a socket-level link (e.g. QPI)\n"
)
P2P = (
    " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tTNS\t\n GPU1\tOK\tX\tTNS\t\n GPU2\tTNS\tTNS\tX\t\n"
    "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  TNS  = Topology not supported\n"
)
LISTED = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-2222-3333-4444-555555555555)\n"
    "  MIG 3g.40gb     Device  0: (UUID: MIG-aaaaaaaa-0000-0000-0000-000000000001)\n"
    "  MIG 3g.40gb     Device  1: (UUID: MIG-aaaaaaaa-0000-0000-0000-000000000002)\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-66666666-7777-8888-9999-000000000000)\n"
)


def ibstat(name: str, *ports: tuple[str, str, object, str], model: str = "MT4129") -> str:
    """Return a CA's block; ports as (state, physical state, rate, link layer)."""
    lines = [f"CA '{name}'", f"\tCA type: {model}", f"\tNumber of ports: {len(ports)}"]
    lines += ["\tFirmware version: 28.40.1000", "\tNode GUID: 0xa088c20300aa0001"]
    for number, (state, phys, rate, layer) in enumerate(ports, 1):
        lines += [f"\tPort {number}:", f"\t\tState: {state}", f"\t\tPhysical state: {phys}"]
        lines += [f"\t\tRate: {rate}", "\t\tBase lid: 17", f"\t\tLink layer: {layer}"]
    return "\n".join(lines) + "\n"


UP = ("Active", "LinkUp", 400, "InfiniBand")

IBSTATUS = """Infiniband device 'mlx5_7' port 1 status:
\tdefault gid:\t unknown
\tbase lid:\t 0x1f
\tsm lid:\t\t 0x1
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 25 Gb/sec (1X EDR)
\tlink_layer:\t Ethernet
"""
DEVINFO = """hca_id:\trocep65s0f1
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t22.31.1014
\tnode_guid:\t\t\t0c42:a103:0065:aa01
\tvendor_part_id:\t\t\t4125
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
\t\t\tactive_width:\t\t4X (2)
\t\t\tactive_speed:\t\t14.0 Gbps (16)
\t\t\tphys_state:\t\tLINK_UP (5)
\t\t\tGID[  0]:\t\tfe80::e42:a1ff:fe65:aa01, RoCE v1
\t\t\tGID[  1]:\t\tfe80::e42:a1ff:fe65:aa01, RoCE v2
\t\t\tGID[  2]:\t\t2001:db8::7, RoCE v2
\t\t\tGID[  5]:\t\t::ffff:10.7.8.9, RoCE v2
"""
DEVINFO_RXE = """hca_id:\trxe0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t0.0.0
\tnode_guid:\t\t\t5054:00ff:fe99:0101
\tvendor_id:\t\t\t0xffffff
\tvendor_part_id:\t\t\t0
\thw_ver:\t\t\t\t0x0
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
"""
RDMA_LINK = (
    "link mlx5_0/1 subnet_prefix fe80:0000:0000:0000 lid 9 sm_lid 1 lmc 0 state ACTIVE "
    "physical_state LINK_UP \n"
    "link rxe0/1 state DOWN physical_state DISABLED netdev eth7\n"
)
OLD_RDMA_LINK = "3/1: i40iw2/1: state ACTIVE physical_state NOP\n"
SHOW_GIDS = (
    "DEV\tPORT\tINDEX\tGID\t\t\t\t\tIPv4  \t\tVER\tDEV\n"
    "---\t----\t-----\t---\t\t\t\t\t------------  \t---\t---\n"
    "mlx5_2\t1\t0\tfe80:0000:0000:0000:0e42:a1ff:fe65:aa01\t\t\tv1\tens2\n"
    "mlx5_2\t1\t1\tfe80:0000:0000:0000:0e42:a1ff:fe65:aa01\t\t\tv2\tens2\n"
    "mlx5_2\t1\t2\t0000:0000:0000:0000:0000:ffff:0a01:0203\t10.1.2.3  \tv1\tens2\n"
    "mlx5_2\t1\t3\t0000:0000:0000:0000:0000:ffff:0a01:0203\t10.1.2.3  \tv2\tens2\n"
    "n_gids_found=4\n"
)


def lspci(acs: str = "ReqRedir- CmpltRedir- UpstreamFwd-", gpu_now: str = "32GT/s (ok)") -> str:
    """Return a switch with a GPU, its NIC and an NVMe port."""

    def bridge(address: str, secondary: str, link: str = "Speed 32GT/s, Width x16") -> str:
        primary = address[:2]
        return (
            f"{address} PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)\n"
            f"\tNUMA node: 1\n\tBus: primary={primary}, secondary={secondary}, "
            f"subordinate=ff, sec-latency=0\n\tCapabilities: [68] Express (v2) Downstream Port\n"
            f"\t\tLnkCap:\tPort #1, {link}, ASPM L0s L1\n\t\tLnkSta:\t{link}\n"
            f"\tCapabilities: [b70 v1] Access Control Services\n"
            f"\t\tACSCtl:\tSrcValid+ TransBlk- {acs} EgressCtrl- DirectTrans-\n\n"
        )

    return (
        bridge("a0:00.0", "a1")
        + bridge("a1:01.0", "a2")
        + bridge("a1:02.0", "a3")
        + bridge("a1:03.0", "a4", "Speed 16GT/s (downgraded), Width x4")
        + "a2:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)\n"
        "\tNUMA node: 1\n\tCapabilities: [60] Express (v2) Endpoint\n"
        "\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1\n"
        f"\t\tLnkSta:\tSpeed {gpu_now}, Width x16 (ok)\n\n"
        "a3:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]\n"
        "\tNUMA node: 1\n\tCapabilities: [60] Express (v2) Endpoint\n"
        "\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported\n"
        "\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)\n\n"
        "a4:00.0 Non-Volatile memory controller: Samsung Device a80a\n"
        "\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x4\n\t\tLnkSta:\tSpeed 16GT/s, Width x4\n"
    )


UCX_V = (
    "# Library version: 1.18.1\n# Library path: /usr/lib/libucs.so.0\n"
    "# API headers version: 1.18.1\n"
    "# Configured with: --enable-mt --with-cuda=/usr/local/cuda --without-gdrcopy\n"
)


def ucx_d(memory: str = "host (access,reg,cache)") -> str:
    """Return domains of tcp, cuda_ipc and one NIC."""
    return (
        "#\n# Memory domain: tcp\n#     Component: tcp\n#         memory types: host (access)\n#\n"
        "#      Transport: tcp\n#         Device: eth0\n#           Type: network\n#\n"
        "# Memory domain: cuda_ipc\n#     Component: cuda_ipc\n"
        "#         memory types: cuda (access,reg,cache)\n#\n"
        "#      Transport: cuda_ipc\n#         Device: cuda\n#           Type: intra-node\n#\n"
        f"# Memory domain: mlx5_2\n#     Component: ib\n#         memory types: {memory}\n#\n"
        "#      Transport: rc_mlx5\n#         Device: mlx5_2:1\n#           Type: network\n#\n"
        "# Memory domain: mlx5_3\n#     Component: ib\n#         memory types: host (access,reg)\n"
        "#   < no supported devices found >\n"
    )


UCX_LOGS = {
    "[1.0] [h:1:0] ucp_context.c:975 UCX  WARN  transport 'cuda_copy' is not available, please "
    "use one or more of: rc, tcp": "no such transport",
    "ucp_context.c:1 UCX  WARN  transport 'rc' is not available, please use one or more of: cuda, "
    "tcp": "no RDMA transport at all",
    "ucp_context.c:1 UCX  WARN  network device 'mlx5_bond_0:1' is not available, please use one or "
    "more of: 'bond0'(tcp)": "mlx5_bond_0:1",
    "ib_md.c:1 UCX  ERROR ibv_reg_mr(address=0x7f) failed: Cannot allocate memory. Please set max "
    "locked memory (ulimit -l) to 'unlimited' (current: 64 kbytes)": "locked memory",
    "cuda_ipc_md.c:112  UCX  ERROR cuIpcGetMemHandle(&key->ph) failed: invalid argument": "IPC",
    "ucp_worker.c:1 UCX  ERROR uct_iface_open(posix/memory) failed: Out of memory": "/dev/shm",
    "wireup.c:1 UCX  DEBUG   ep 0x1: lane[1]:  0:tcp/docker0.0 md[0]": "docker0",
    "mm_posix.c:1 UCX  ERROR open(file_name=/proc/77/fd/45 flags=0x0) failed: No such file": (
        "PID namespace"
    ),
    "ib_device.c:1 UCX  ERROR Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15 vend "
    "0x81 hw_synd 0/0)": "did not answer",
    "ib_md.c:9  UCX  WARN  IB: ibv_fork_init() was disabled or failed, yet a fork() has been "
    "issued.": "forked",
    "sock.c:3 UCX  ERROR   connect(fd=8, dest_addr=10.0.0.9:39289) failed: No route to host": (
        "No route to host"
    ),
}
