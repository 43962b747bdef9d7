"""Nodes compared: which one is odd, and in what."""

from __future__ import annotations

from pathlib import Path

from rdmakit.topology.compare import Difference, Facts, compare
from tests.unit import fake_machines as fakes
from tests.unit.topo_machines import found, survey


def test_odd_node_is_named_and_equal_ones_shown_once(tmp_path: Path) -> None:
    for number in range(3):
        odd = number == 1
        fakes.hgx_h100(
            tmp_path / f"n{number}",
            f"node{number}",
            roce=True,
            number=number + 1,
            firmware="28.39.1002" if odd else "28.41.1000",
            mtu=1500 if odd else 4200,
            driver="535.1" if odd else "550.1",
            down=(2,) if odd else (),
        )
    whole = survey(*(found(tmp_path / f"n{number}") for number in range(3)))
    assert whole.alike == ((0, 2), (1,))
    told = {d.what: d for d in whole.differences}
    assert set(told) >= {"driver", "mlx5_0 firmware", "mlx5_0:1 net device MTU", "mlx5_2:1 state"}
    assert told["driver"].odd == (("535.1", (1,)),)
    assert "node1: 535.1" in told["driver"].describe(whole.names)
    assert not any("GID" in what or "role" in what for what in told), "addresses do not differ"


def test_missing_device_is_one_difference(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path / "a", "a")
    fakes.hgx_h100(tmp_path / "b", "b", absent=(5,))
    whole = survey(found(tmp_path / "a"), found(tmp_path / "b"))
    assert [d.what for d in whole.differences] == ["RDMA devices"]


def test_gid_index_differs(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path / "a", "a", roce=True)
    fake = fakes.hgx_h100(tmp_path / "b", "b", roce=True, number=2)
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    real = (fake.root / port.lstrip("/")).resolve()
    (real / "gids/4").write_text((real / "gids/3").read_text())
    (real / "gid_attrs/types/4").write_text("RoCE v2\n")
    (real / "gid_attrs/types/3").write_text("IB/RoCE v1\n")
    whole = survey(found(tmp_path / "a"), found(tmp_path / "b"))
    told = {d.what: d for d in whole.differences}
    assert told["mlx5_0:1 RoCE v2 GID index"].usual == "3"
    assert told["mlx5_0:1 RoCE v2 GID index"].odd == (("4", (1,)),)


def test_compare_majority_and_order() -> None:
    facts = [Facts({"kernel": k, "driver": d}, {}) for k, d in (("1", "a"), ("2", "b"), ("2", "a"))]
    first, second = compare(facts)
    assert (first.what, first.usual, first.odd) == ("driver", "a", (("b", (1,)),))
    assert (second.what, second.usual, second.grave) == ("kernel", "2", False)
    assert compare(facts[:1]) == []


def test_of_two_nodes_that_differ_both_are_named() -> None:
    """No number tells which of them is wrong."""
    usual_of_two = Difference("MTU", "1500", (0,), (("4200", (1,)),))
    assert usual_of_two.describe(["a", "b"]) == "MTU: 1500 on a; b: 4200"
    usual_of_three = Difference("MTU", "1500", (0, 2), (("4200", (1,)),))
    assert usual_of_three.describe(["a", "b", "c"]) == "MTU: 1500 on 2 node(s); b: 4200"
