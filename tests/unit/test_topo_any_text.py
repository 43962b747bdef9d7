"""Which tool a text is of, and that parsers of other tools' outputs survive any text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.topology.parsers.gids import parse_show_gids
from rdmakit.topology.parsers.lspci import parse_lspci
from rdmakit.topology.parsers.ports import parse_ports
from rdmakit.topology.parsers.smi_list import parse_list
from rdmakit.topology.parsers.smi_matrix import parse_matrices
from rdmakit.topology.parsers.ucx_info import parse_ucx_info
from rdmakit.topology.parsers.ucx_log import read_ucx_log
from rdmakit.topology.texts import kinds_of, read_texts
from tests.unit import topo_texts as texts

SAMPLES = [
    texts.TABS + texts.LEGEND + texts.NAMES,
    texts.OLD,
    texts.P2P,
    texts.LISTED,
    texts.ibstat("mlx5_0", texts.UP, texts.UP),
    texts.IBSTATUS,
    texts.DEVINFO,
    texts.RDMA_LINK,
    texts.OLD_RDMA_LINK,
    texts.SHOW_GIDS,
    texts.lspci(),
    texts.UCX_V,
    texts.ucx_d(),
    "\n".join(texts.UCX_LOGS),
]
KINDS = [
    "matrix",
    "matrix",
    "matrix",
    "list",
    "ports",
    "ports",
    "ports",
    "ports",
    "ports",
    "gids",
    "lspci",
    "ucx",
    "ucx",
    "log",
]


@pytest.mark.parametrize(("sample", "kind"), list(zip(SAMPLES, KINDS, strict=True)))
def test_kinds_are_told_by_content(sample: str, kind: str) -> None:
    assert kind in kinds_of(sample)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Draw a sample with pieces cut out, doubled, replaced or mixed with another one."""
    text = draw(st.sampled_from(SAMPLES))
    for _ in range(draw(st.integers(0, 6))):
        if not text:
            break
        a = draw(st.integers(0, len(text) - 1))
        b = min(len(text), a + draw(st.integers(0, 60)))
        piece = draw(
            st.one_of(
                st.just(""),
                st.just(text[a:b] * 2),
                st.text(max_size=12),
                st.sampled_from(["\t", "\r\n", "\x1b[4m", "\x00", "NV999999", "99999999999", "X"]),
            )
        )
        text = text[:a] + piece + text[b:]
    if draw(st.booleans()):
        text += draw(st.sampled_from(SAMPLES))
    return text


PARSERS = [
    parse_matrices,
    parse_list,
    parse_ports,
    parse_show_gids,
    parse_lspci,
    parse_ucx_info,
    read_ucx_log,
    kinds_of,
]


@settings(max_examples=150, deadline=None)
@given(st.one_of(damaged(), st.text(max_size=300)))
def test_parsers_take_any_text(text: str) -> None:
    for parser in PARSERS:
        parser(text)  # type: ignore[operator]
    read_texts({"some.txt": text})


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_parsers_take_any_bytes(data: bytes) -> None:
    read_texts({"some.txt": data.decode("utf-8", errors="replace")})
