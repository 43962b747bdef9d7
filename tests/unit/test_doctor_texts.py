"""nvidia-smi -q, the kernel's log and lsmod, understood and told apart from other texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.topology.model import PciControl
from rdmakit.topology.parsers.kernel_log import KernelLog, Xid, parse_kernel_log
from rdmakit.topology.parsers.lsmod import parse_modules
from rdmakit.topology.parsers.lspci import parse_lspci
from rdmakit.topology.parsers.smi_query import SmiQuery, parse_query
from rdmakit.topology.texts import kinds_of, read_texts
from tests.unit import doctor_texts as texts


def test_query() -> None:
    told = parse_query(texts.query({}, {"compute": "Prohibited", "lost": "7"}, driver="535.1"))
    assert (told.driver, told.cuda, told.problem) == ("535.1", "12.4", "")
    assert [gpu.pci for gpu in told.gpus] == ["0000:17:00.0", "0000:18:00.0"]
    first, second = told.gpus
    assert first.value("Compute Mode") == "Default"
    assert second.value("Compute Mode") == "Prohibited"
    assert first.mebibytes(r"BAR1 Memory Usage/Total") == 131072
    assert first.value(r"Clocks Event Reasons/HW Slowdown/HW Thermal Slowdown") == "Not Active"
    assert first.value(r"Retired Pages/Pending Page Blacklist") is None  # N/A
    assert first.counts(r"ECC Errors/Volatile/.*Uncorrectable.*") == {}
    assert second.counts(r"ECC Errors/Volatile/.*Uncorrectable.*") == {"DRAM Uncorrectable": 7}


@pytest.mark.parametrize(
    "text",
    [
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library: 550.90\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
    ],
)
def test_query_that_failed(text: str) -> None:
    told = parse_query(text)
    assert told.gpus == ()
    assert text.startswith(told.problem)
    assert told.problem
    assert kinds_of(text) == ("query",)


def test_kernel_log() -> None:
    log = parse_kernel_log(texts.DMESG_HEAD + "".join(texts.DMESG.values()))
    assert log.known
    assert [(xid.pci, xid.number) for xid in log.xids] == [
        ("0000:17:00.0", 79),
        ("0000:17:00.0", 31),
        ("0000:17:00.0", 109),
        ("0000:18:00.0", 63),
    ]
    assert log.xids[0].text.endswith("GPU has fallen off the bus.")
    assert log.peermem == (
        "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)",
    )
    assert log.mismatch == ("550.90.07",)
    assert log.cables == (("0000:18:00.0", "High Temperature"),)


def test_a_cable_that_was_put_right() -> None:
    plugged = "[ 30.000001] mlx5_core 0000:18:00.0: Port module event: module 0, Cable plugged\n"
    assert parse_kernel_log(texts.DMESG["cable"]).cables
    assert parse_kernel_log(texts.DMESG["cable"] + plugged).cables == ()


def test_xid_with_the_gpus_uuid() -> None:
    line = "NVRM: Xid (PCI:0000:c1:00 GPU-aaaa-bbbb): 94, Contained: SM (0x1)\n"
    assert parse_kernel_log(line).xids == (Xid("0000:c1:00.0", 94, "Contained: SM (0x1)"),)


def test_modules_of_both_forms() -> None:
    lsmod = "Module          Size  Used by\nib_core  450560  2 mlx5_ib,nvidia-peermem\n"
    expected = {"ib_core": ("mlx5_ib", "nvidia_peermem"), "nvidia": ()}
    assert parse_modules(lsmod + "nvidia  6000  8\n") == expected
    proc = "ib_core 450560 2 mlx5_ib,nvidia_peermem, Live 0x0\nnvidia 6000 8 - Live 0x0 (PO)\n"
    assert parse_modules(proc) == expected


def test_control_of_lspci() -> None:
    told = {
        d.address: d.control for d in parse_lspci(texts.lspci(ordering="-", read="512")).devices
    }
    assert told["0000:18:00.0"] == PciControl(False, 512)
    assert told["0000:17:00.0"] == PciControl(True, 4096)
    assert told["0000:16:00.0"] is None


def test_each_text_is_told_by_its_content() -> None:
    found = read_texts(
        {
            "a": texts.query({}),
            "b": texts.DMESG_HEAD + texts.DMESG["fell"],
            "c": "Module                  Size  Used by\nnvidia_peermem  16384  0\n",
        }
    )
    assert found.kinds == {"a": ("query",), "b": ("kernel",), "c": ("modules",)}
    assert found.problems == ()
    assert len(found.query.gpus) == 1
    assert found.kernel.xids[0].number == 79
    assert found.modules == {"nvidia_peermem": ()}


def test_lines_of_ucx_are_no_kernel_log() -> None:
    line = "[1712345678.123456] [node1:4711 :0]         ucp_context.c:1234 UCX  WARN  something\n"
    assert "kernel" not in kinds_of(line)
    assert kinds_of("[Mon Mar  4 10:20:30 2024] NVRM: loading\n") == ("kernel",)


WORDS = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from([*texts.query({}).splitlines(), *texts.DMESG.values(), "GPU 0:0:0.0"]),
    ),
    max_size=30,
).map("\n".join)


@settings(deadline=None)
@given(WORDS)
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert isinstance(parse_query(text), SmiQuery)
    assert isinstance(parse_kernel_log(text), KernelLog)
    for name, users in parse_modules(text).items():
        assert name
        assert all(users)
