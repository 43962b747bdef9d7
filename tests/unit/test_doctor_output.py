"""Findings folded over nodes, and every output read back by somebody else's rules."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.doctor.fold import count, cures, exit_status, fold, names_of, where
from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Finding, Status
from rdmakit.errors import InvalidArgument
from rdmakit.pretty import pretty_json
from rdmakit.report import doctor_text
from rdmakit.report.doctor_files import junit, prometheus, write_whole
from rdmakit.report.doctor_schema import DoctorResult, Outcome, doctor_result
from rdmakit.report.doctor_text import print_doctor

_TEXT = st.text(max_size=12)
_FINDING = st.builds(
    Finding,
    check=st.sampled_from(["a.x", "a.y", "b.x"]),
    status=st.sampled_from(Status),
    found=_TEXT,
    subject=st.sampled_from(["", "mlx5_0:1", 'q"\\\n']),
    cure=st.sampled_from(["", "do this", "do that"]),
    urgency=st.integers(0, 99),
)
_NODES = st.lists(
    st.builds(
        NodeReport,
        host=st.one_of(st.sampled_from(["n0", "n1"]), _TEXT),
        ranks=st.lists(st.integers(0, 9), min_size=1, max_size=2),
        findings=st.lists(_FINDING, max_size=5),
        complete=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def finding(check: str, status: str, found: str = "x", **more: object) -> Finding:
    return Finding(check=check, status=Status(status), found=found, **more)  # type: ignore[arg-type]


def node(host: str, *findings: Finding, rank: int = 0, complete: bool = True) -> NodeReport:
    return NodeReport(host=host, ranks=[rank], findings=list(findings), complete=complete)


@settings(deadline=None)
@given(_NODES)
def test_folding_loses_and_invents_nothing(nodes: list[NodeReport]) -> None:
    folded = fold(nodes)
    pairs = {(entry.finding, index) for entry in folded for index in entry.nodes}
    assert pairs == {(f, index) for index, own in enumerate(nodes) for f in own.findings}
    assert len({entry.finding for entry in folded}) == len(folded)
    order = [entry.finding.status.badness for entry in folded]
    assert order == sorted(order), "the worst first"
    told = cures(folded)
    assert len({cure.text for cure in told}) == len(told)
    assert [cure.urgency for cure in told] == sorted(cure.urgency for cure in told)
    bad = {f.cure for own in nodes for f in own.findings if f.cure and f.status in ("fail", "warn")}
    assert {cure.text for cure in told} == bad


def test_of_equal_urgency_the_cure_of_more_nodes_is_first() -> None:
    nodes = [node(f"n{i}", finding("a.x", "fail", cure="A", urgency=9)) for i in range(5)]
    nodes[0].findings.append(finding("a.y", "warn", cure="B", urgency=9))
    nodes[3].findings += [finding("a.z", "warn", cure="C", urgency=1), finding("b.x", "ok")]
    assert [(cure.text, cure.nodes) for cure in cures(fold(nodes))] == [
        ("C", (3,)),
        ("A", (0, 1, 2, 3, 4)),
        ("B", (0,)),
    ]


@pytest.mark.parametrize(
    ("nodes", "total", "text"),
    [
        ((0,), 1, ""),
        ((), 4, ""),
        ((0, 1, 2, 3), 4, "all 4 nodes"),
        ((2,), 4, "n2"),
        ((1, 2), 4, "2 of 4 nodes: n1, n2"),
        (tuple(range(14)), 16, "14 of 16 nodes"),
        (tuple(range(7)), 16, "7 of 16 nodes: n0, n1, n2, n3, n4, n5 and 1 more"),
    ],
)
def test_where(nodes: Sequence[int], total: int, text: str) -> None:
    assert where(nodes, [f"n{i}" for i in range(total)]) == text


def test_names_are_unique() -> None:
    nodes = [node("vm", rank=0), node("vm", rank=4), node("other", rank=8)]
    assert names_of(nodes) == ["vm (rank 0)", "vm (rank 4)", "other"]


def test_counts_and_exit_status() -> None:
    nodes = [
        node("a", finding("a.x", "ok"), finding("a.x", "warn"), finding("a.y", "unknown")),
        node("b", finding("a.x", "ok"), finding("a.y", "skipped")),
    ]
    counts = count(nodes, [finding("job.x", "ok")])
    assert counts == {"fail": 0, "warn": 1, "unknown": 1, "ok": 2, "skipped": 1}
    assert exit_status(counts, strict=False) == 0
    assert exit_status(counts, strict=True) == 3
    assert exit_status({**counts, Status.FAIL: 1}, strict=True) == 1


# -- JSON ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(_NODES, st.lists(_FINDING, max_size=3))
def test_json_is_what_its_schema_says(nodes: list[NodeReport], job: list[Finding]) -> None:
    outcome = Outcome(nodes, tuple(job), {"a.x": "why x"})
    text = pretty_json(doctor_result(outcome))
    result = msgspec.json.decode(text, type=DoctorResult)
    assert result.schema == "rdmakit.doctor/1"
    assert result.exit == outcome.exit
    assert sum(len(own.nodes) or 1 for own in result.findings) == len(set(job)) + sum(
        len(set(own.findings)) for own in nodes
    )
    for own in result.findings:
        assert own.why == ("why x" if own.check == "a.x" else "")


# -- JUnit -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(_NODES, st.booleans())
def test_junit_is_read_back(nodes: list[NodeReport], strict: bool) -> None:
    root = ElementTree.fromstring(junit(Outcome(nodes, strict=strict)))
    suites = root.findall("testsuite")
    assert len(suites) == len(nodes)
    for suite, own in zip(suites, nodes, strict=True):
        cases = suite.findall("testcase")
        assert int(suite.attrib["tests"]) == len(cases) == len({f.check for f in own.findings})
        for kind, name in (("failure", "failures"), ("skipped", "skipped")):
            assert int(suite.attrib[name]) == len([c for c in cases if c.find(kind) is not None])
        for case in cases:
            statuses = {f.status for f in own.findings if f.check == case.attrib["name"]}
            bad = Status.FAIL in statuses or (strict and Status.WARN in statuses)
            assert (case.find("failure") is not None) == bad
            if Status.UNKNOWN in statuses and not bad and Status.WARN not in statuses:
                skipped = case.find("skipped")
                assert skipped is not None, "unknown is never passed"
                assert skipped.attrib["message"].startswith("unknown: ")


def test_junit_tells_the_cure() -> None:
    bad = finding("net.mtu", "fail", "1500 \x07<&", expected="9000", cure="ip link", subject="eth0")
    root = ElementTree.fromstring(junit(Outcome([node("n0", bad)], whys={"net.mtu": "Slow."})))
    case = root.find("testsuite/testcase[@classname='net'][@name='net.mtu']")
    assert case is not None
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["message"] == "1500 ?<&"
    assert failure.text == "fail: eth0: 1500 ?<&; expected 9000\n  why: Slow.\n  cure: ip link"


# -- Prometheus ------------------------------------------------------------------------------------

_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? ([0-9.]+)')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"')


def read_metrics(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read the text format 0.0.4 strictly: each family announced, each sample once."""
    assert text.endswith("\n")
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    announced = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            assert word in ("HELP", "TYPE")
            if word == "TYPE":
                assert rest == "gauge"
                announced = name
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        name, inside, value = match.groups()
        assert name == announced
        labels = frozenset(
            (key, re.sub(r"\\.", lambda m: _ESCAPES[m[0]], text))
            for key, text in _LABEL.findall(inside or "")
        )
        assert (name, labels) not in found, "a sample twice"
        found[name, labels] = float(value)
    return found


@settings(deadline=None)
@given(_NODES, st.lists(_FINDING, max_size=2))
def test_metrics_are_read_back(nodes: list[NodeReport], job: list[Finding]) -> None:
    metrics = read_metrics(prometheus(Outcome(nodes, tuple(job)), now=12.5))
    assert metrics["rdmakit_doctor_run_timestamp_seconds", frozenset()] == 12.5
    for name, own in zip(names_of(nodes), nodes, strict=True):
        reported = metrics["rdmakit_doctor_node_reported", frozenset([("node", name)])]
        assert reported == own.complete
        for check in {f.check for f in own.findings}:
            worst = min((f.status for f in own.findings if f.check == check), key=_badness)
            labels = {"node": name, "check": check, "status": worst.value}
            value = metrics["rdmakit_doctor_check_status", frozenset(labels.items())]
            assert value == {"ok": 0, "skipped": 1, "unknown": 2, "warn": 3, "fail": 4}[worst]


def _badness(status: Status) -> int:
    return status.badness


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "rdmakit.prom"
    write_whole(path, "old\n")
    write_whole(path, "new\n")
    assert path.read_text() == "new\n"
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"
    with pytest.raises(InvalidArgument, match="cannot be written"):
        write_whole(tmp_path / "absent" / "x", "")


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("real")
    write_whole(link, "text\n")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "text\n"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text\n")
    assert os.read(reader, 99) == b"text\n"
    os.close(reader)
    assert pipe.is_fifo()


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(doctor_text, "on_terminal", lambda: False)
    long = "what is there " * 12
    nodes = [
        node(
            f"n{i}", finding("a.x", "fail", long, cure="cure one", urgency=1), finding("b.x", "ok")
        )
        for i in range(4)
    ]
    nodes[2].findings[0] = finding("a.x", "unknown", "who knows")
    nodes[3].findings.append(finding("b.y", "skipped", "no GPU is here"))
    nodes[3].complete = False
    print_doctor(Outcome(nodes, whys={"a.x": "It matters."}), title="title")
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    flat = " ".join(out.split())
    for text in (
        f"fail a.x [3 of 4 nodes: n0, n1, n3]: {long.strip()} It matters.",
        "unknown a.x [n2]: who knows",
        "ok b: x [all 4 nodes]",
        "skipped b: y [n3]: no GPU is here",
        "1. cure one (a.x; 3 of 4 nodes: n0, n1, n3)",
        "checks: 3 fail, 1 could not be found out, 4 ok, 1 skipped (nothing to check)",
        "no whole report from: n3",
        "What could not be found out is not ok",
    ):
        assert text in flat, out
    assert flat.index("fail a.x") < flat.index("unknown a.x") < flat.index("ok b")
    print_doctor(Outcome(nodes), title="title", verbose=True)
    assert "ok b.x [all 4 nodes]: x" in " ".join(capsys.readouterr().out.split())


def test_one_reason_for_many_unknowns_is_told_in_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_text, "on_terminal", lambda: False)
    blind = [finding(f"a.{name}", "unknown", "not run") for name in "vwxyz"]
    others = [finding("b.x", "unknown", "no root"), finding("b.y", "unknown", "no root")]
    outcome = Outcome([node("n0", *blind, *others), node("n1", *others)])
    print_doctor(outcome, title="title")
    flat = " ".join(capsys.readouterr().out.split())
    assert "unknown a: v, w, x, y, z [n0]: not run" in flat
    assert "unknown b.x [all 2 nodes]: no root" in flat
    assert flat.count("not run") == 1
    print_doctor(outcome, title="title", verbose=True)
    assert capsys.readouterr().out.count("not run") == len(blind)
