"""Parsers of other tools' outputs: right values, None for what the text does not say."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.topology.acs import check_path, judge_acs, judge_link
from rdmakit.topology.model import Gid, PcieLink, Port, normal_address
from rdmakit.topology.parsers.gids import choose_gid, parse_show_gids
from rdmakit.topology.parsers.lspci import parse_lspci
from rdmakit.topology.parsers.ports import parse_ports
from rdmakit.topology.parsers.smi_list import parse_list
from rdmakit.topology.parsers.smi_matrix import parse_matrices
from rdmakit.topology.parsers.ucx_info import parse_ucx_info
from rdmakit.topology.parsers.ucx_log import read_ucx_log
from rdmakit.topology.texts import read_texts
from rdmakit.topology.tree import PciTree
from tests.unit import topo_texts as texts

# -- nvidia-smi topo -----------------------------------------------------------------------------


def test_matrix_with_tabs_escapes_and_an_empty_column() -> None:
    (found,) = parse_matrices(texts.TABS + texts.LEGEND + texts.NVLINK + texts.NAMES)
    assert found.gpus == ("GPU0", "GPU1")
    assert found.nics == ("NIC0", "NIC1")
    assert found.nic_names == {"NIC0": "mlx5_3", "NIC1": "mlx5_bond_0"}
    assert found.matrix.cell("GPU1", "NIC1") == "PXB"
    assert found.matrix.nvlinks("GPU0", "GPU1") == 4
    own = found.affinity["GPU1"]
    assert (own.cpu, own.numa, own.gpu_numa) == ("8-15,24-31", "1", "N/A")
    assert not found.problems
    assert not found.unread


def test_old_matrix_without_numa_column() -> None:
    (found,) = parse_matrices(texts.OLD)
    assert found.nic_names == {"mlx4_0": "mlx4_0"}
    assert found.matrix.cell("GPU0", "mlx4_0") == "SOC"
    assert str(found.matrix.relation("GPU0", "mlx4_0")) == "SYS"
    assert found.matrix.nvlinks("GPU0", "GPU1") == 0
    assert found.affinity["GPU0"].numa is None
    assert found.columns == ("cpu",)


def test_mp_hides_nvlink_and_that_is_not_zero() -> None:
    plain = texts.TABS.replace("NV4", "SYS")
    (hidden,) = parse_matrices(plain + texts.LEGEND)
    assert hidden.matrix.nvlinks("GPU0", "GPU1") is None
    (shown,) = parse_matrices(plain + texts.LEGEND + texts.NVLINK)
    assert shown.matrix.nvlinks("GPU0", "GPU1") == 0


def test_names_are_not_invented_without_a_legend() -> None:
    (found,) = parse_matrices(texts.TABS)
    assert found.nic_names == {}
    assert any("NIC legend is missing" in problem for problem in found.problems)


def test_two_digit_names_are_not_cut() -> None:
    names = [f"GPU{index}" for index in range(12)]
    header = "        " + "    ".join(names) + "    CPU Affinity\n"
    rows = [
        f"{name}    "
        + "    ".join("X" if a == b else f"NV{abs(a - b)}" for b in range(12))
        + "    0-11\n"
        for a, name in enumerate(names)
    ]
    (found,) = parse_matrices(header + "".join(rows))
    assert len(found.gpus) == 12
    assert found.matrix.cell("GPU1", "GPU11") == "NV10"
    assert found.matrix.cell("GPU1", "GPU10") == "NV9"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("\n", "\r\n"),
        lambda t: t.expandtabs(8),
        lambda t: "\n".join("# " + line for line in t.split("\n")),
        lambda t: "\n".join("[1,0]<stdout>:" + line for line in t.split("\n")),
        lambda t: "\n".join("> " + line for line in t.split("\n")),
        lambda t: re.sub(r"^(?=\S)(.*)$", r"|\1|", t, flags=re.M).replace("\t", " | "),
        lambda t: "some prose before GPU0 and after\n\n" + t,
    ],
)
def test_matrix_survives_how_people_paste(change) -> None:
    (found,) = parse_matrices(change(texts.TABS + texts.LEGEND + texts.NVLINK + texts.NAMES))
    assert found.matrix.cell("NIC0", "GPU0") == "PIX"
    assert found.affinity["GPU0"].cpu == "0-7,16-23"
    assert found.affinity["GPU1"].numa == "1"


@settings(max_examples=60, deadline=None)
@given(st.integers(44, 140), st.booleans())
def test_a_terminal_may_break_rows_anywhere(width: int, stripped: bool) -> None:
    names = [*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(9))]
    words = {
        (a, b): "X"
        if a == b
        else "NV18"
        if a < 8 and b < 8
        else ("PIX", "NODE", "SYS")[(a + b) % 3]
        for a in range(17)
        for b in range(17)
    }
    rows = ["        " + "".join(f"{name:8}" for name in names) + "CPU Affinity    NUMA Affinity"]
    for a, name in enumerate(names):
        tail = f"{f'{a * 8}-{a * 8 + 7},96-103':16}{a // 4}" if a < 8 else ""
        rows.append(f"{name:8}" + "".join(f"{words[a, b]:8}" for b in range(17)) + tail)
    broken = [
        piece.rstrip() if stripped else piece
        for row in rows
        for piece in (row[i : i + width] for i in range(0, len(row), width))
        if piece.strip()
    ]
    (found,) = parse_matrices("\n".join(broken) + "\n")
    assert len(found.gpus) == 8
    assert len(found.nics) == 9
    for (a, b), word in words.items():
        assert found.matrix.cell(names[a], names[b]) == word
    for a in range(8):
        own = found.affinity[names[a]]
        assert own.cpu in (f"{a * 8}-{a * 8 + 7},96-103", None)
        assert own.numa in (str(a // 4), None)


def test_cut_paste_is_reported_and_its_last_cell_not_believed() -> None:
    cut = texts.TABS[: texts.TABS.index("8-15,24-31") + 6].expandtabs(8)
    (found,) = parse_matrices(cut)
    assert found.gpus == ("GPU0", "GPU1")
    assert found.affinity["GPU1"].cpu is None
    assert any("no row for NIC0, NIC1" in problem for problem in found.problems)
    # Of a relation that is cut off, NV1 of NV12 is not believed either.
    (found,) = parse_matrices("        GPU0    GPU1    GPU2\nGPU0     X      NV12    NV1")
    assert found.matrix.cell("GPU0", "GPU2") is None
    assert found.matrix.cell("GPU0", "GPU1") == "NV12"
    assert found.unread


def test_affinities_that_ran_together_are_not_guessed() -> None:
    text = (
        "        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
        "GPU0     X      SYS     0-55,112-167 0N/A\n"
        "GPU1    SYS      X      56-111,168-2231               N/A\n"
    )
    (found,) = parse_matrices(text)
    first, second = found.affinity["GPU0"], found.affinity["GPU1"]
    assert (first.cpu, first.numa, first.gpu_numa) == ("0-55,112-167", "0", "N/A")
    assert (second.cpu, second.numa, second.gpu_numa) == (None, None, "N/A")
    assert (
        sum("run into it" in problem or "ran together" in problem for problem in found.problems)
        == 2
    )


def test_lost_header_is_rebuilt_from_the_diagonal() -> None:
    body = texts.OLD.split("\n", 1)[1]
    (found,) = parse_matrices(body)
    assert found.gpus == ("GPU0", "GPU1")
    assert found.nics == ("mlx4_0",)
    assert found.matrix.cell("GPU1", "mlx4_0") == "PHB"
    assert any("header is missing" in problem for problem in found.problems)


def test_rows_that_contradict_each_other_are_named() -> None:
    (found,) = parse_matrices(texts.TABS.replace("NIC1\tSYS\tPXB", "NIC1\tSYS\tPIX"))
    assert "GPU1-NIC1 is PXB in one row and PIX in the other" in found.problems


def test_p2p_matrix_is_no_topology() -> None:
    (found,) = parse_matrices(texts.P2P)
    assert found.kind == "p2p"
    assert found.matrix.cell("GPU0", "GPU2") == "TNS"
    assert found.matrix.relation("GPU0", "GPU2") is None
    assert found.matrix.nvlinks("GPU0", "GPU1") is None
    both = read_texts({"a": texts.TABS + "\n" + texts.P2P})
    assert both.matrix is not None
    assert both.p2p is not None


def test_mig_listing_is_no_matrix() -> None:
    assert parse_matrices(texts.LISTED) == []
    listed = parse_list(texts.LISTED)
    assert [gpu.uuid[:8] for gpu in listed.gpus] == ["GPU-1111", "GPU-6666"]
    assert [len(gpu.mig) for gpu in listed.gpus] == [2, 0]
    assert listed.mig_devices == 2
    assert listed.cuda_devices == 1


# -- RDMA ports ----------------------------------------------------------------------------------


def test_ibstat_two_ports_and_a_tool_that_failed() -> None:
    down = ("Down", "Polling", 40, "Ethernet")
    text = texts.ibstat("mlx4_0", texts.UP, down) + (
        "ibpanic: [77] main: stat of IB device 'mlx4_1' failed: No such file or directory\n"
    )
    found = parse_ports(text)
    (nic,) = found.nics
    assert (nic.model, nic.firmware, nic.guid) == ("MT4129", "28.40.1000", "a088c20300aa0001")
    first, second = nic.ports
    assert (first.state, first.rate_gbps, first.speed_gbps, first.lid) == ("Active", 400, 400, 17)
    assert (second.phys, second.rate_gbps, second.speed_gbps) == ("Polling", 40, None)
    assert found.errors
    assert "mlx4_1" in found.errors[0]


def test_ibstatus_and_devinfo() -> None:
    (nic,) = parse_ports(texts.IBSTATUS).nics
    (port,) = nic.ports
    assert (port.state, port.phys, port.rate_gbps, port.lid) == ("ACTIVE", "LinkUp", 25, 31)
    assert port.default_gid == "unknown"
    (nic,) = parse_ports(texts.DEVINFO).nics
    (port,) = nic.ports
    assert (nic.name, nic.firmware) == ("rocep65s0f1", "22.31.1014")
    assert (port.state, port.phys, port.rate_gbps) == ("PORT_ACTIVE", "LINK_UP", 56)
    assert (port.active_mtu, port.max_mtu, port.width) == (1024, 4096, "4X")
    assert port.active
    assert port.link_up
    assert choose_gid(port) == (5, "RoCE v2, 10.7.8.9")


def test_part_number_of_a_software_device() -> None:
    (nic,) = parse_ports(texts.DEVINFO_RXE).nics
    assert (nic.name, nic.model, nic.ports[0].active_mtu) == ("rxe0", None, 1024)
    (nic,) = parse_ports(texts.DEVINFO).nics
    assert nic.model == "4125"


def test_rdma_link_new_and_old() -> None:
    first, second = parse_ports(texts.RDMA_LINK).nics
    assert first.ports[0] == Port(1, "ACTIVE", "LINK_UP", None, "InfiniBand", 9, 1)
    assert (second.ports[0].link_layer, second.ports[0].netdev) == ("Ethernet", "eth7")
    (old,) = parse_ports(texts.OLD_RDMA_LINK).nics
    assert old.ports[0].link_layer == "iWARP"
    assert old.ports[0].link_up is None


def test_devices_of_several_texts_are_joined() -> None:
    found = read_texts({"a": texts.ibstat("mlx5_2", texts.UP), "b": texts.SHOW_GIDS})
    assert [nic.name for nic in found.ports.nics] == ["mlx5_2"]
    assert found.gids.count == 4
    assert not found.problems
    short = read_texts({"b": texts.SHOW_GIDS.replace("found=4", "found=9")})
    assert any("4 of 9 GIDs" in problem for problem in short.problems)


def test_gid_choice() -> None:
    (table,) = parse_show_gids(texts.SHOW_GIDS).tables.values()
    assert choose_gid(Port(1, gids=table))[0] == 3
    v1 = (Gid(0, "::ffff:10.0.0.1", "RoCE v1"),)
    assert choose_gid(Port(1, gids=v1))[0] is None
    local = (Gid(1, "fe80::1", "RoCE v2"),)
    index, why = choose_gid(Port(1, gids=local))
    assert index is None
    assert "link-local" in why
    assert choose_gid(Port(1, link_layer="InfiniBand"))[0] == 0
    assert choose_gid(Port(1))[0] is None


# -- PCIe ----------------------------------------------------------------------------------------


def test_lspci_path_of_gpu_and_nic() -> None:
    found = parse_lspci(texts.lspci())
    tree = PciTree(found.devices)
    kinds = {device.address: device.kind for device in found.devices}
    assert kinds["0000:a2:00.0"] == "gpu"
    assert kinds["0000:a3:00.0"] == "nic"
    check = check_path(tree, "0000:a2:00.0", "0000:a3:00.0")
    # The downgraded port to the NVMe disk is not on the way.
    assert check.bridges == ("0000:a1:01.0", "0000:a0:00.0", "0000:a1:02.0")
    assert (check.acs, check.verdict) == ("off", "PASS")
    assert str(tree.relation("0000:a2:00.0", "0000:a3:00.0")) == "PIX"


@pytest.mark.parametrize("bit", ["ReqRedir", "CmpltRedir", "UpstreamFwd"])
def test_redirect_fails_and_source_validation_does_not(bit: str) -> None:
    bits = " ".join(
        f"{b}{'+' if b == bit else '-'}" for b in ("ReqRedir", "CmpltRedir", "UpstreamFwd")
    )
    devices = parse_lspci(texts.lspci(bits)).devices
    check = check_path(PciTree(devices), "0000:a2:00.0", "0000:a3:00.0")
    assert (check.acs, check.verdict) == ("redirect", "FAIL")


def test_without_root_access_control_is_unknown() -> None:
    hidden = "\n".join(
        line
        for line in texts.lspci().split("\n")
        if "Capabilities" not in line and "ACSCtl" not in line and "Lnk" not in line
    ).replace("sec-latency=0", "sec-latency=0\n\tCapabilities: <access denied>")
    found = parse_lspci(hidden)
    assert found.denied
    check = check_path(PciTree(found.devices), "0000:a2:00.0", "0000:a3:00.0")
    assert (check.acs, check.verdict) == ("unknown", "UNKNOWN")


def test_idle_gpu_is_no_fault_but_lost_lanes_are() -> None:
    devices = parse_lspci(texts.lspci(gpu_now="2.5GT/s (downgraded)")).devices
    check = check_path(PciTree(devices), "0000:a2:00.0", "0000:a3:00.0")
    assert check.verdict == "PASS"
    assert check.reasons[0].startswith("INFO")
    link = PcieLink(8.0, 16, 16.0, 16)
    assert judge_link(link, gpu=True).startswith("INFO")
    assert judge_link(link, gpu=False).startswith("WARN")
    assert judge_link(link, gpu=False, partner=PcieLink(8.0, 16, 8.0, 16)) == ""
    assert judge_link(PcieLink(16.0, 8, 16.0, 16), gpu=True).startswith("WARN")


def test_lines_without_their_devices() -> None:
    text = (
        "\tACSCtl: SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd-\n"
        "\tACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+\n"
        "\tLnkCap: Port #0, Speed 16GT/s, Width x16\n\tLnkSta: Speed 2.5GT/s, Width x16\n"
    )
    found = parse_lspci(text)
    assert [acs.redirects for acs in found.loose_acs] == [False, True]
    assert judge_acs(found.loose_acs)[0] == "redirect"
    assert judge_acs(found.loose_acs[:1])[0] == "off"
    assert found.loose_links == (PcieLink(2.5, 16, 16.0, 16),)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1A:00.0", "0000:1a:00.0"),
        ("1a:00.0", "0000:1a:00.0"),
        ("0009:01:00.0", "0009:01:00.0"),
        ("nonsense", None),
        (None, None),
    ],
)
def test_addresses_of_all_tools_are_one(text: str | None, address: str | None) -> None:
    assert normal_address(text) == address


# -- UCX -----------------------------------------------------------------------------------------


def test_ucx_version_and_build() -> None:
    found = parse_ucx_info(texts.UCX_V)
    assert found.version == "1.18.1"
    assert found.built_with_cuda is True
    assert found.built_with_gdrcopy is False
    assert found.built_with_verbs is None
    assert found.transports is None
    assert found.gpudirect_rdma is None


@pytest.mark.parametrize(
    ("memory", "gpudirect", "dmabuf"),
    [
        ("host (access,reg,cache)", False, False),
        ("host (access,reg), cuda (access,reg,cache)", True, None),
        ("host (access,reg), cuda (access,reg,dmabuf)", True, True),
    ],
)
def test_gpudirect_is_read_from_the_nics_domain_only(
    memory: str, gpudirect: bool, dmabuf: bool | None
) -> None:
    found = parse_ucx_info(texts.ucx_d(memory))
    assert found.gpudirect_rdma is gpudirect
    assert found.dmabuf is dmabuf
    assert found.transports == ("tcp", "cuda_ipc", "rc_mlx5")
    assert found.net_devices == ("eth0", "mlx5_2:1")
    assert found.dead_devices == ("mlx5_3",)
    assert found.rails == 1
    assert ("FAIL" in found.verdict) is not gpudirect


def test_ucx_without_memory_types_is_unknown_not_false() -> None:
    text = "".join(line + "\n" for line in texts.ucx_d().split("\n") if "memory types" not in line)
    assert parse_ucx_info(text).gpudirect_rdma is None
    grepped = "#      Transport: tcp\n" + "#      Transport: rc_mlx5\n" * 3
    found = parse_ucx_info(grepped)
    assert (found.rails, found.has("rc_mlx5"), found.has("cuda_ipc")) == (3, True, False)


@pytest.mark.parametrize(("line", "word"), list(texts.UCX_LOGS.items()))
def test_ucx_messages_have_a_meaning_and_a_cure(line: str, word: str) -> None:
    (found,) = read_ucx_log("all fine here\n" + line + "\n" + line)
    assert word in found.problem
    assert found.fix
    assert found.line == 2
