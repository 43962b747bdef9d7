"""Outputs of commands for the doctor's checks, made up in the forms that the tools print."""

from __future__ import annotations

QUERY_HEAD = """
==============NVSMI LOG==============

Timestamp                                 : Mon Mar  4 10:20:30 2024
Driver Version                            : {driver}
CUDA Version                              : 12.4

Attached GPUs                             : {count}
"""

QUERY_GPU = """GPU {pci}
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : {persistence}
    MIG Mode
        Current                           : {mig}
        Pending                           : {mig}
    PCI
        Bus                               : 0x17
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : {thermal}
            HW Power Brake Slowdown       : Not Active
        SW Thermal Slowdown               : Not Active
    FB Memory Usage
        Total                             : 81559 MiB
        Used                              : 1 MiB
    BAR1 Memory Usage
        Total                             : {bar1} MiB
        Used                              : {bar1_used} MiB
        Free                              : 10 MiB
    Compute Mode                          : {compute}
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 5
            SRAM Uncorrectable Parity     : 0
            SRAM Uncorrectable SEC-DED    : 0
            DRAM Correctable              : 0
            DRAM Uncorrectable            : {lost}
        Aggregate
            SRAM Correctable              : 5
            DRAM Uncorrectable            : 3
    Retired Pages
        Pending Page Blacklist            : N/A
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : {pending}
        Remapping Failure Occurred        : {failed}
    Fabric
        State                             : {fabric}
        Status                            : {fabric_status}
    Processes                             : None

"""

GOOD = {
    "persistence": "Enabled",
    "mig": "Disabled",
    "thermal": "Not Active",
    "bar1": "131072",
    "bar1_used": "1",
    "compute": "Default",
    "lost": "0",
    "pending": "No",
    "failed": "No",
    "fabric": "Completed",
    "fabric_status": "Success",
}


def query(*gpus: dict[str, str], driver: str = "550.54.15") -> str:
    """Return ``nvidia-smi -q`` of GPUs that are well but for what is given."""
    text = QUERY_HEAD.format(driver=driver, count=len(gpus))
    for index, values in enumerate(gpus):
        text += QUERY_GPU.format(pci=f"00000000:{0x17 + index:02X}:00.0", **{**GOOD, **values})
    return text


DMESG_HEAD = """[    0.000000] Linux version 5.15.0-105-generic (build@host) (gcc 11.4.0)
[    3.141592] nvidia-nvlink: Nvlink Core is being initialized, major device number 510
"""

DMESG = {
    "fell": "[ 8123.456789] NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, "
    "GPU has fallen off the bus.\n",
    "program": "[ 8123.456789] NVRM: Xid (PCI:0000:17:00): 31, pid=4711, name=python3, Ch 0a, "
    "intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0x7f_00000000.\n",
    "timeout": "[ 8200.000001] NVRM: Xid (PCI:0000:17:00): 109, pid=4712, name=pt_main_thread, "
    "Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x2c014\n",
    "remapped": "[ 99.000001] NVRM: Xid (PCI:0000:18:00): 63, pid=11, Row Remapper: marked\n",
    "symbol": "[   12.000002] nvidia_peermem: Unknown symbol ib_register_peer_memory_client "
    "(err -22)\n",
    "mismatch": "[  700.000003] NVRM: API mismatch: the client has the version 550.90.07, but\n"
    "[  700.000004] NVRM: this kernel module has the version 550.54.15.  Please\n",
    "cable": "[   20.000005] mlx5_core 0000:18:00.0: Port module event[error]: module 0, Cable "
    "error, High Temperature\n",
}

LSPCI = """15:00.0 PCI bridge: Switch Maker Device c030 (rev b0) (prog-if 00 [Normal decode])
\tBus: primary=15, secondary=16, subordinate=1c, sec-latency=0
\tCapabilities: [68] Express (v2) Upstream Port, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)

16:00.0 PCI bridge: Switch Maker Device c030 (rev b0) (prog-if 00 [Normal decode])
\tBus: primary=16, secondary=17, subordinate=17, sec-latency=0
\tCapabilities: [68] Express (v2) Downstream Port (Slot+), MSI 00
\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16 (ok)
\tCapabilities: [170 v1] Access Control Services
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir{acs} CmpltRedir{acs} UpstreamFwd{acs} EgressCtrl-

16:01.0 PCI bridge: Switch Maker Device c030 (rev b0) (prog-if 00 [Normal decode])
\tBus: primary=16, secondary=18, subordinate=18, sec-latency=0
\tCapabilities: [68] Express (v2) Downstream Port (Slot+), MSI 00
\t\tLnkCap:\tPort #2, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x{width} (ok)
\tCapabilities: [170 v1] Access Control Services
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-

17:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tDevCtl:\tCorrErr+ NonFatalErr+ FatalErr+ UnsupReq+
\t\t\tRlxdOrd+ ExtTag+ PhantFunc- AuxPwr- NoSnoop- FLReset-
\t\t\tMaxPayload 256 bytes, MaxReadReq 4096 bytes
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16 (ok)

18:00.0 {nic}
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tDevCtl:\tCorrErr+ NonFatalErr+ FatalErr+ UnsupReq+
\t\t\tRlxdOrd{ordering} ExtTag+ PhantFunc- AuxPwr- NoSnoop+ FLReset-
\t\t\tMaxPayload 256 bytes, MaxReadReq {read} bytes
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x{width} (ok)
"""


def lspci(**change: str) -> str:
    """Return ``lspci -vvv`` of a GPU and a NIC behind a switch, well but for what is given."""
    values = {
        "acs": "-",
        "width": "16",
        "ordering": "+",
        "read": "4096",
        "nic": "Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]",
    }
    return LSPCI.format(**{**values, **change})


def ibstat(
    name: str,
    *,
    state: str = "Active",
    phys: str = "LinkUp",
    rate: int = 400,
    layer: str = "InfiniBand",
    lid: int = 7,
    sm_lid: int = 1,
    model: str = "MT4129",
    firmware: str = "28.41.1000",
    guid: str = "",
) -> str:
    """Return ``ibstat`` of a device with one port."""
    guid = guid or f"0x0102030405{sum(map(ord, name)):04x}00"
    return (
        f"CA '{name}'\n\tCA type: {model}\n\tNumber of ports: 1\n"
        f"\tFirmware version: {firmware}\n\tHardware version: 0\n\tNode GUID: {guid}\n"
        f"\tSystem image GUID: {guid}\n\tPort 1:\n\t\tState: {state}\n"
        f"\t\tPhysical state: {phys}\n\t\tRate: {rate}\n\t\tBase lid: {lid}\n\t\tLMC: 0\n"
        f"\t\tSM lid: {sm_lid}\n\t\tCapability mask: 0xa751e848\n\t\tLink layer: {layer}\n"
    )


UCX_D = """#
# Memory domain: mlx5_0
#     Component: ib
#             register: unlimited, dmabuf, cost: 16000 + 0.060 * N nsec
#         memory types: {memory}
#
#      Transport: rc_mlx5
#         Device: mlx5_0:1
#           Type: network
#
# Memory domain: cuda_cpy
#     Component: cuda_cpy
#         memory types: host (reg), cuda (access,alloc,reg,detect)
#
#      Transport: cuda_copy
#         Device: cuda
#           Type: accelerator
#
# Memory domain: gdr_copy
#     Component: gdr_copy
#         memory types: cuda (access,reg)
#
#      Transport: gdr_copy
#         Device: cuda
#           Type: accelerator
"""
