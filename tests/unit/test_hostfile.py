"""Hostfiles of all dialects: read, checked, converted, and what a launcher would do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.errors import InvalidArgument
from rdmakit.hostfile.convert import TARGETS, convert
from rdmakit.hostfile.launch import plan_launch
from rdmakit.hostfile.model import DIALECTS, Hostfile
from rdmakit.hostfile.nodelist import compress, expand, expand_counts
from rdmakit.hostfile.parse import parse_hostfile, read_slurm
from rdmakit.survey.hostfile import HostfileOptions, run_hostfile

SHIPPED = Path(__file__).resolve().parents[2] / "hostfiles"


def slots(hostfile: Hostfile) -> dict[str, int | None]:
    return {host.name: host.slots for host in hostfile.hosts}


def errors(text: str, dialect: str | None = None) -> list[tuple[int | None, str]]:
    return [(p.line, p.text) for p in parse_hostfile(text, dialect).errors]


def warnings(text: str, *own: str) -> str:
    return " | ".join(str(p) for p in parse_hostfile(text, None, own).problems)


# -- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dialect", "expected"),
    [
        ("a slots=3\nb slots=5\n", "openmpi", {"a": 3, "b": 5}),
        ("a\tslots = 3\tmax-slots = 4\n  b   cpu=5", "openmpi", {"a": 3, "b": 5}),
        ("# x\na count=2 slots_max=9 # y\n\n", "openmpi", {"a": 2}),
        ("a\nb.example.org slots=2\n", "openmpi", {"a": None, "b.example.org": 2}),
        ("a\nb\na\na\n", "plain", {"a": 3, "b": 1}),
        ("a\nb\n", "plain", {"a": None, "b": None}),
        ("a:3\nb\nc:2 # z\n", "hydra", {"a": 3, "b": 1, "c": 2}),
        ("a:3\nb:1\na:2\n", "hydra", {"a": 5, "b": 1}),
        ("a:4:mlx5_0\na:4:mlx5_1\nb:7", "mvapich", {"a": 8, "b": 7}),
        ("[2001:db8::7]:6\n", "hydra", {"2001:db8::7": 6}),
        ("2001:db8::7:8 slots=3\n", "openmpi", {"2001:db8::7:8": 3}),
        ("u@a slots=2\n", "openmpi", {"a": 2}),
        ("a-1_x slots=1\na-2_x slots=1\n", "openmpi", {"a-1_x": 1, "a-2_x": 1}),
        ("10.0.0.1 slots=2\n10.0.0.2 slots=2\n", "openmpi", {"10.0.0.1": 2, "10.0.0.2": 2}),
        ("\ufeffa slots=2\r\nb slots=2\r\n", "openmpi", {"a": 2, "b": 2}),
        ("n[1-2,7]\n", "slurm", {"n1": None, "n2": None, "n7": None}),
    ],
)
def test_reads(text: str, dialect: str, expected: dict[str, int | None]) -> None:
    found = parse_hostfile(text)
    assert found.dialect == dialect
    assert not found.errors
    assert slots(found) == expected
    assert slots(parse_hostfile(text.rstrip("\n"))) == expected, "with and without a line end"


def test_details_are_kept() -> None:
    found = parse_hostfile("u@a slots=2 max_slots=5\nb:4:mlx5_0\n", "mvapich")
    assert (found.hosts[0].user, found.hosts[0].max_slots) == ("u", 5)
    assert found.hosts[1].hcas == ("mlx5_0",)
    assert found.hosts[0].lines == (1,)


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a slots=2\nx y z\n", 2, "token 'y' not understood: one host per line"),
        ("a slots=2\nthis is odd slots=1\n", 2, "bad entry: 'this is odd slots=1'"),
        ("a slots=2\n\na slots=2\n", 3, "multiple definitions of the slot count for a"),
        ("a\na slots=2\n", 2, "multiple definitions"),
        ("a slots=0", 1, "slots=0"),
        ("a slots=-1", 1, "slots=-1"),
        ("a slots=two", 1, "not a whole number"),
        ("a slots=", 1, "has no value"),
        ("a slots=2.0", 1, "not a whole number"),
        ("a slots=4 max_slots=2", 1, "less than"),
        ("a slots=2 slots=3", 1, "given twice"),
        ("a colour=red slots=1", 1, "no keyword"),
        ("2001:db8::10:8\n", 1, "ambiguous"),
        ("# only\n\n  \n", None, "no hosts in file"),
        ("", None, "no hosts in file"),
        ("a:x\n", 1, "not a whole number"),
        ("a:4,b:4\n", 1, "--host"),
        ("^a\n", 1, "excluded"),
        ("+n1\n", 1, "relative"),
        ("@a slots=1", 1, "no user"),
        ("n[1-3] slots=2", 1, "only Slurm expands"),
        ("n[3-1]\n", 1, "backwards"),
        ("n[1-3\na[1-2]\n", 1, "not closed"),
        ("n[1-99999999]\n", 1, "more than"),
        ("n[1-2]:8\n", 1, "no counts"),
    ],
)
def test_errors_name_the_line(text: str, line: int | None, word: str) -> None:
    found = [entry for entry in errors(text) if word in entry[1]]
    assert found, errors(text)
    assert found[0][0] == line
    assert parse_hostfile(text).total is None


def test_every_bad_line_is_reported() -> None:
    assert [line for line, _ in errors("a slots=x\nb slots=1\nc slots=\n")] == [1, 3]


def test_dialect_asked_for() -> None:
    assert "Open MPI takes the whole for a name" in errors("a:4\n", "openmpi")[0][1]
    assert "DeepSpeed needs slots=" in errors("a slots=1\nb\n", "deepspeed")[0][1]
    with pytest.raises(InvalidArgument, match="dialect"):
        parse_hostfile("a", "lsf")


@pytest.mark.parametrize(
    ("text", "own", "words"),
    [
        ("localhost slots=4\n127.0.0.1 slots=4\n", (), "8 ranks on one node, not 2 nodes"),
        ("localhost slots=1\nhead slots=1\n", ("head",), "2 ranks on one node"),
        ("localhost slots=1\nb slots=1\n", (), "other nodes cannot reach it"),
        ("n.a.org slots=1\nn.b.org slots=1\n", (), "takes them for one host, n, and refuses"),
        ("n.a.org\nn.b.org\n", (), "Open MPI drops domains"),
        ("N1 slots=1\nn1 slots=1\n", (), "differ in capitals only"),
        ("a slots=8\nb slots=7\n", (), "different numbers of slots"),
        ("a\na\nb\n", (), "b stands once without slots"),
        ("a slots=4\nb slots=1\na\n", (), "Open MPI adds one slot"),
        ("a slots=1\r\n", (), "line ends of Windows"),
        ("\ufeffa slots=1\n", (), "byte-order mark"),
    ],
)
def test_warnings(text: str, own: tuple[str, ...], words: str) -> None:
    assert words in warnings(text, *own)
    assert not errors(text)


def test_good_files_get_no_warning() -> None:
    for text in (
        "a slots=8\nb slots=8\n",
        "w-0.job.ns.svc slots=8\nw-1.job.ns.svc slots=8\n",
        "10.0.0.1 slots=8\n10.0.0.2 slots=8\n",
    ):
        assert not parse_hostfile(text).problems
    for name in ("openmpi-2x8.txt", "mpich-2x8.txt", "openmpi-localhost.txt"):
        assert not parse_hostfile((SHIPPED / name).read_text()).problems


# -- node lists ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4],m", ["n1", "n3", "n4", "m"]),
        ("t[2,1-2]", ["t2", "t1", "t2"]),
        ("r[0-1]b[0-1]", ["r0b0", "r0b1", "r1b0", "r1b1"]),
        ("n[9-11]x", ["n9x", "n10x", "n11x"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a[", "a]", "a[[1]]", "a[1-]", "a[b]", "a b", "a[]"])
def test_bad_node_lists(text: str) -> None:
    with pytest.raises(InvalidArgument):
        expand(text)


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,4}(-ib)?", fullmatch=True), min_size=1))
def test_node_lists_round_trip(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == hosts


def test_slurm_jobs() -> None:
    found = read_slurm("n[1-3]", "8(x2),7")
    assert slots(found) == {"n1": 8, "n2": 8, "n3": 7}
    assert found.total == 23
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert "2 nodes, but tasks for 3" in str(read_slurm("n[1-2]", "8(x3)").errors[0])
    assert read_slurm("n[1-2]", "many").errors


# -- launching -----------------------------------------------------------------------------------


def shares(text: str, ranks: int, **how: object) -> dict[str, tuple[int, ...]]:
    found = plan_launch(parse_hostfile(text), ranks, **how)  # type: ignore[arg-type]
    assert not found.refused, found.refused
    return {share.host: share.ranks for share in found.shares}


def test_open_mpi_fills_hosts_in_order() -> None:
    text = "a slots=2\nb slots=3\nc slots=2\n"
    assert shares(text, 4) == {"a": (0, 1), "b": (2, 3), "c": ()}
    assert shares(text, 5, map_by="node") == {"a": (0, 3), "b": (1, 4), "c": (2,)}
    assert shares(text, 6, map_by="ppr:2:node") == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}


@pytest.mark.parametrize(
    ("text", "ranks", "how", "word"),
    [
        ("a slots=2\n", 3, {}, "not enough slots: 3 ranks, 2 slots"),
        ("a slots=2\nb slots=1\n", 3, {"map_by": "ppr:2:node"}, "b: fewer slots than 2"),
        ("a slots=4\nb slots=4\n", 6, {"map_by": "ppr:2:node"}, "are 4, not 6"),
        ("localhost slots=2\n127.0.0.1 slots=2\n", 4, {}, "multiple definitions"),
        ("a slots=x\n", 1, {}, "has errors"),
    ],
)
def test_refusals(text: str, ranks: int, how: dict[str, str], word: str) -> None:
    assert word in plan_launch(parse_hostfile(text), ranks, **how).refused  # type: ignore[arg-type]


def test_hosts_without_slots_depend_on_cores() -> None:
    found = plan_launch(parse_hostfile("a\nb\n"), 2)
    assert "--cores" in found.notes[0]
    assert shares("a\nb\n", 2, cores=16) == {"a": (0, 1), "b": ()}
    assert shares("a\nb\n", 2, launcher="hydra") == {"a": (0,), "b": (1,)}


def test_names_that_open_mpi_merges() -> None:
    found = plan_launch(parse_hostfile("n.a.org\nn.b.org\n"), 2)
    (share,) = found.shares
    assert share.names == ("n.a.org", "n.b.org")
    assert share.ranks == (0, 1)
    assert "one host" in found.notes[0]


def test_hydra_begins_again() -> None:
    found = plan_launch(parse_hostfile("a:2\nb:1\n"), 7)
    assert {s.host: s.ranks for s in found.shares} == {"a": (0, 1, 3, 4, 6), "b": (2, 5)}
    assert found.oversubscribed
    assert "begins again" in found.notes[0]


def test_slurm_shares() -> None:
    assert shares("n[1-3]\n", 7) == {"n1": (0, 1, 2), "n2": (3, 4), "n3": (5, 6)}
    job = read_slurm("n[1-2]", "2,1")
    assert {s.host: s.ranks for s in plan_launch(job, 3).shares} == {"n1": (0, 1), "n2": (2,)}
    assert "3 tasks" in plan_launch(job, 4).refused


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 60),
    st.sampled_from(["openmpi", "hydra"]),
    st.sampled_from(["slot", "node"]),
)
def test_every_rank_is_placed_once(
    counts: list[int], ranks: int, launcher: str, map_by: str
) -> None:
    text = "".join(
        f"h{i} slots={c}\n" if launcher == "openmpi" else f"h{i}:{c}\n"
        for i, c in enumerate(counts)
    )
    found = plan_launch(parse_hostfile(text), ranks, map_by=map_by)
    placed = Counter(rank for share in found.shares for rank in share.ranks)
    if launcher == "openmpi" and ranks > sum(counts):
        assert found.refused
        assert not placed
    else:
        assert placed == Counter(range(ranks))
    if launcher == "openmpi":
        assert not found.oversubscribed


@pytest.mark.parametrize(
    ("ranks", "how"), [(0, {}), (1, {"launcher": "pbs"}), (1, {"map_by": "core"})]
)
def test_bad_questions(ranks: int, how: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        plan_launch(parse_hostfile("a slots=1\n"), ranks, **how)  # type: ignore[arg-type]


# -- converting ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,4}[0-9]{1,3}", fullmatch=True), st.integers(1, 64)),
        min_size=1,
        max_size=8,
        unique_by=lambda entry: entry[0],
    ),
    st.sampled_from(["openmpi", "hydra", "intelmpi", "deepspeed"]),
    st.sampled_from(["openmpi", "hydra", "intelmpi", "deepspeed"]),
)
def test_conversion_keeps_hosts_and_slots(
    hosts: list[tuple[str, int]], first: str, second: str
) -> None:
    text = "".join(f"{name} slots={count}\n" for name, count in hosts)
    there = convert(parse_hostfile(text), first)
    back = convert(parse_hostfile(there, first), second)
    assert slots(parse_hostfile(back, second)) == dict(hosts)


def test_conversion_details() -> None:
    found = parse_hostfile("[2001:db8::7]:6\nu@b:2\n")
    assert convert(found, "hydra") == "[2001:db8::7]:6\nb:2 user=u\n"
    assert convert(found, "openmpi") == "2001:db8::7 slots=6\nu@b slots=2\n"
    assert convert(parse_hostfile("n1\nn2\nn4\n"), "slurm") == "n[1-2,4]\n"
    assert convert(parse_hostfile("n1\n"), "openmpi") == "n1\n"
    assert convert(parse_hostfile("n1\n"), "hydra", slots=3) == "n1:3\n"
    for bad in (("n1\n", "hydra"), ("n1 slots=x\n", "openmpi"), ("n1 slots=1\n", "pbs")):
        with pytest.raises(InvalidArgument):
            convert(parse_hostfile(bad[0]), bad[1])


# -- any text ------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(max_size=80),
        st.text(alphabet="ab1[]-,:= \n\t#@.slots", max_size=80),
    ),
    st.sampled_from([None, *DIALECTS]),
    st.integers(1, 20),
)
def test_any_text_is_survived(text: str, dialect: str | None, ranks: int) -> None:
    found = parse_hostfile(text, dialect, ("me",))
    plan_launch(found, ranks)
    if found.errors:
        assert found.total is None
    for target in TARGETS:
        if not found.errors:
            assert convert(found, target, slots=1).endswith("\n")


# -- the command ---------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "h"
    file.write_text("a slots=2\nb slots=2\n")
    assert run_hostfile(HostfileOptions(str(file), ranks=4)) == 0
    out = capsys.readouterr().out
    assert "0-1" in out
    assert "4 ranks on 2 of 2 host(s)" in out
    assert run_hostfile(HostfileOptions(str(file), ranks=5)) == 1
    assert "refused" in capsys.readouterr().out
    assert run_hostfile(HostfileOptions(str(file), to="hydra")) == 0
    assert capsys.readouterr().out == "a:2\nb:2\n"
    assert run_hostfile(HostfileOptions(str(file), ranks=3, json=True)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == "rdmakit.hostfile/1"
    assert result["total"] == 4
    assert [share["ranks"] for share in result["launch"]["hosts"]] == [[0, 1], [2]]
    file.write_text("a slots=\n")
    assert run_hostfile(HostfileOptions(str(file))) == 1
    assert "error: line 1" in capsys.readouterr().out


def test_command_in_a_slurm_job(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "7"}
    assert run_hostfile(HostfileOptions(to="openmpi"), env) == 0
    assert capsys.readouterr().out == "n1 slots=4\nn2 slots=4\n"
    with pytest.raises(InvalidArgument, match="no Slurm job"):
        run_hostfile(HostfileOptions(), {})
    with pytest.raises(InvalidArgument, match="cannot be read"):
        run_hostfile(HostfileOptions("/nonexistent/file"), {})
