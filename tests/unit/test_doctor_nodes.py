"""Reports of nodes come to rank 0 by letters; ranks are threads, of which some say nothing."""

from __future__ import annotations

import queue
import sys
import threading
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from rdmakit.doctor.context import RankView
from rdmakit.doctor.messages import NodeReport, Order
from rdmakit.doctor.model import Status
from rdmakit.doctor.nodes import Collector, End, Hello, Member, Said, _Ask, form_nodes
from rdmakit.doctor.supervise import NODE_CHECK, Limits
from rdmakit.errors import TransferTimeout

PROGRAM = """
import sys
from rdmakit.doctor.model import Check, Status
from rdmakit.doctor.worker import serve
from rdmakit.drivers.host import HostTree
def told(context):
    yield A.finding(Status.OK, ",".join(str(view.rank) for view in context.ranks))
A = Check("t.a", "A", "A.", told)
serve([A], tree=HostTree(sys.argv[1]), parent=int(sys.argv[2]))
"""
SECONDS = {"t.a": 30.0}
PATIENT = Limits(look=40.0, node=60.0, silence=30.0)


class Post:
    """Letter boxes of all ranks."""

    def __init__(self) -> None:
        self.boxes: dict[int, queue.Queue[tuple[int, bytes]]] = defaultdict(queue.Queue)


class Mail:
    """A rank's place at the post; a rank that is ``lost`` gets letters and never answers."""

    def __init__(self, post: Post, rank: int, size: int) -> None:
        self.post, self.rank, self.size = post, rank, size

    def send(self, rank: int, data: bytes) -> None:
        self.post.boxes[rank].put((self.rank, data))

    def receive(self) -> tuple[int, bytes] | None:
        try:
            return self.post.boxes[self.rank].get_nowait()
        except queue.Empty:
            return None

    @property
    def unsent(self) -> set[int]:
        return set()


def hello(rank: int, node: str) -> Hello:
    view = RankView(rank=rank, local_rank=0, host=f"h{node}", pid=1, environ={}, facts={})
    return Hello(node, view)


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "worker.py"
    path.write_text(PROGRAM)
    return (sys.executable, str(path), str(tmp_path))


def start(
    post: Post, ranks: dict[int, str], command: tuple[str, ...], limits: Limits
) -> dict[int, End]:
    """Start members of these ranks; return what each is told at the end."""
    ends: dict[int, End] = {}

    def member(rank: int) -> None:
        mail = Mail(post, rank, len(ranks) + 1)
        ends[rank] = Member(mail, limits).run(hello(rank, ranks[rank]), SECONDS, command)

    for rank in ranks:
        threading.Thread(target=member, args=(rank,), daemon=True).start()
    return ends


def test_every_node_reports(command: tuple[str, ...]) -> None:
    post = Post()
    ends = start(post, {1: "a", 2: "b", 3: "b"}, command, PATIENT)
    formed: list[NodeReport] = []
    words: list[tuple[int, Said]] = []
    collector = Collector(
        Mail(post, 0, 4), PATIENT, formed.extend, lambda node, said: words.append((node, said))
    )
    assert collector.run(hello(0, "a"), Order(checks=["t.a"]), SECONDS, command)
    assert [(node.host, node.ranks, node.complete) for node in collector.nodes] == [
        ("ha", [0, 1], True),
        ("hb", [2, 3], True),
    ]
    assert [node.findings[0].found for node in collector.nodes] == ["0,1", "2,3"]
    assert collector.missing == []
    assert [node.ranks for node in formed] == [[0, 1], [2, 3]]
    assert {node for node, said in words if said.complete} == {0, 1}
    for _ in range(500):
        if len(ends) == 3:
            break
        threading.Event().wait(0.02)
    assert list(ends.values()) == [End(True, [0, 2])] * 3


def test_ranks_that_say_nothing_are_named(command: tuple[str, ...]) -> None:
    limits = Limits(look=40.0, node=60.0, silence=6.0)
    post = Post()
    # Rank 1 reports; 2 said hello and no more; 3 is not the first of its node and went silent;
    # 4 never said a word.
    member = Member(Mail(post, 1, 5), limits)
    told: list[End] = []
    thread = threading.Thread(
        target=lambda: told.append(member.run(hello(1, "b"), SECONDS, command)), daemon=True
    )
    thread.start()
    for rank, node in ((2, "c"), (3, "a")):
        post.boxes[0].put((rank, msgspec.json.encode(hello(rank, node))))
    collector = Collector(Mail(post, 0, 5), limits)
    assert not collector.run(hello(0, "a"), Order(checks=["t.a"]), SECONDS, command)
    thread.join(20)
    assert told == [End(False, [0, 1, 2])]
    good, other, silent = collector.nodes
    assert good.complete
    assert other.complete
    assert other.findings[0].found == "1"
    assert not silent.complete
    (finding,) = silent.findings
    assert finding.check == NODE_CHECK
    assert finding.status is Status.FAIL
    assert finding.cure
    assert "node hc: no report within 6 s (rank 2" in finding.found
    missing = [finding.found for finding in collector.missing]
    assert len(missing) == 2
    assert "rank 4: no word within 6 s" in missing[0]
    assert "rank 3 (host ha): no sign of life any more" in missing[1]


def test_rank_0_that_says_nothing_is_given_up() -> None:
    post = Post()
    member = Member(Mail(post, 1, 2), Limits(silence=0.5))
    # Before its first word it is to have the time to say that it misses this rank.
    with pytest.raises(TransferTimeout, match="rank 1: rank 0 gave no sign of life for 2 s"):
        member.run(hello(1, "a"), SECONDS)
    post.boxes[1].put((0, msgspec.json.encode(_Ask())))
    member = Member(Mail(post, 1, 2), Limits(silence=0.5))
    with pytest.raises(TransferTimeout, match=r"rank 1: rank 0 gave no sign of life for 0\.5 s"):
        member.run(hello(1, "a"), SECONDS)


def test_nodes_are_in_the_order_of_their_first_ranks() -> None:
    hellos = {rank: hello(rank, name) for rank, name in ((3, "x"), (0, "y"), (2, "x"), (1, "y"))}
    assert [(node.host, node.ranks) for node in form_nodes(hellos)] == [
        ("hy", [0, 1]),
        ("hx", [2, 3]),
    ]
