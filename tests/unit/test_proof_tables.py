"""UCX's tables: printed by UCX 1.20.1 (real_*) and made up in its format (constructed_*)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.proof.evidence import TableUse
from rdmakit.proof.tables import Table, copies_host, parse_tables, use_of

FOLDER = Path(__file__).parent / "ucx_tables"
TEXTS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.txt"))}


def use(name: str, memory: str, nbytes: int, side: str = "sender") -> TableUse:
    found = use_of(parse_tables(TEXTS[name]), memory, nbytes, side)
    assert found is not None
    return found


def test_every_text_is_read() -> None:
    assert len(TEXTS) == 9
    for name, text in TEXTS.items():
        assert len(parse_tables(text)) == text.count("cfg#"), name
        rows = text.count("..") + sum(" 0 |" in line for line in text.splitlines())
        assert sum(len(table.rows) for table in parse_tables(text)) == rows, name


def test_tables_of_tcp() -> None:
    tables = parse_tables(TEXTS["real_tcp_sender"])
    assert [t.operation for t in tables] == [
        "tagged message by ucp_tag_send*",
        "tagged message by ucp_tag_send*(fast-completion)",
        "tagged message by ucp_tag_send*(multi)",
    ]
    assert {t.memory for t in tables} == {"host"}
    assert {t.other for t in tables} == {""}
    assert tables[1].rows[2].low == 256 << 10
    assert tables[1].rows[2].high is None
    assert tables[0].rows[0].high == 0


@pytest.mark.parametrize(
    ("name", "nbytes", "text", "lane"),
    [
        ("real_tcp_sender", 100, "eager short", "tcp/eth0"),
        ("real_tcp_sender", 1762, "multi-frag eager copy-in copy-out", "tcp/eth0"),
        ("real_tcp_receiver", 4 << 20, "rendezvous fragmented copy-in copy-out", "tcp/eth0"),
        ("real_sysv_cma_sender", 6030, "eager copy-in copy-out", "sysv/memory"),
        ("real_sysv_cma_sender", 6031, "rendezvous zero-copy read from remote", "cma/memory"),
        ("real_posix_sender", 238621, "multi-frag eager copy-in copy-out", "posix/memory"),
    ],
)
def test_row_of_a_size(name: str, nbytes: int, text: str, lane: str) -> None:
    found = use(name, "host", nbytes)
    assert found.text == text
    assert [f"{t}/{d}" for t, d, _ in found.lanes] == [lane]
    assert found.operation.endswith("(multi)")  # what ucxx sends with
    assert found.certain == ("rendezvous" not in text)


def test_no_table_for_that_memory() -> None:
    assert use_of(parse_tables(TEXTS["real_tcp_sender"]), "cuda", 8, "sender") is None
    assert use_of((), "host", 8, "sender") is None


def test_gpu_memory_read_by_the_nic() -> None:
    sender = use("constructed_gdr_sender", "cuda", 1 << 20)
    assert sender.text == "rendezvous zero-copy read from remote"
    assert sender.lanes == (("rc_mlx5", "mlx5_0:1", 74), ("rc_mlx5", "mlx5_1:1", 26))
    assert not sender.certain
    assert not copies_host(sender)
    receiver = use("constructed_gdr_receiver", "cuda", 1 << 20, "receiver")
    assert receiver.operation == "rendezvous data fetch(multi)"
    assert receiver.text == "zero-copy read from remote"
    assert receiver.certain
    assert not copies_host(receiver)
    other = parse_tables(TEXTS["constructed_gdr_receiver"])[1]
    assert (other.memory, other.other) == ("cuda", "cuda")


def test_small_gpu_messages_wait_in_host_buffers() -> None:
    assert copies_host(use("constructed_gdr_sender", "cuda", 4096))


@pytest.mark.parametrize("nbytes", [100, 100_000, 1 << 20, (1 << 20) + 1, 1 << 30])
def test_gpu_memory_copied_by_ucx(nbytes: int) -> None:
    assert copies_host(use("constructed_staged_sender", "cuda", nbytes))


def test_lines_in_between_and_cut_off() -> None:
    text = TEXTS["real_tcp_sender"]
    mixed = "\n".join(
        f"{line}\n[1] [vm:1:0] sock.c:1 UCX WARN | noise" for line in text.splitlines()
    )
    assert parse_tables(mixed) == parse_tables(text)
    for cut in range(0, len(text), 97):
        for table in parse_tables(text[:cut]):
            assert isinstance(table, Table)
            assert table.rows


@given(st.text(alphabet="|+-. 0123456789infKMab/:%(?)\n[]", max_size=300))
def test_never_raises(text: str) -> None:
    parse_tables(text)
