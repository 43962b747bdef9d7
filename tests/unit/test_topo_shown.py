"""What is printed, drawn, written and explained of a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.discovery.collect import read_machines
from rdmakit.errors import InvalidArgument
from rdmakit.pretty import pretty_json
from rdmakit.report.topo_schema import SCHEMA, TopoResult, topo_result
from rdmakit.report.topo_svg import draw
from rdmakit.report.topo_text import print_topo
from rdmakit.topology.explain import explain
from rdmakit.topology.model import Machine
from tests.unit import fake_machines as fakes
from tests.unit import topo_texts as texts
from tests.unit.topo_machines import any_machine, found, survey

__all__ = ["any_machine"]  # a fixture


def test_every_machine_is_shown_drawn_and_written(
    any_machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = survey(any_machine)
    print_topo(whole, title="topo")
    out = capsys.readouterr().out
    assert "proposed placement" in out
    assert "\x1b" not in out
    for gpu in any_machine.gpus:
        assert gpu.label in out
    for nic in any_machine.nics:
        assert nic.label in out
    root = ET.fromstring(draw(whole))
    drawn = " ".join(
        element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")
    )
    for gpu in any_machine.gpus:
        assert gpu.label in drawn
    for nic in any_machine.nics:
        assert nic.label in drawn
    result = msgspec.json.decode(pretty_json(topo_result(whole)), type=TopoResult)
    assert result.schema == SCHEMA
    assert len(result.ranks) == max(1, len(any_machine.gpus))


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """Return the boxes of a picture, without the background and the colour key."""
    found = []
    for rect in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("rx"):
            x, y, w, h = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + w, y + h))
    return found


def test_nothing_overlaps_in_a_picture(any_machine: Machine) -> None:
    svg = draw(survey(any_machine))
    found = boxes(svg)
    root = ET.fromstring(svg)
    for i, (x1, y1, x2, y2) in enumerate(found):
        assert x1 >= 0
        assert x2 <= float(root.get("width", "0"))
        assert y2 <= float(root.get("height", "0"))
        for a1, b1, a2, b2 in found[:i]:
            assert x2 <= a1 or a2 <= x1 or y2 <= b1 or b2 <= y1


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_picture_is_xml_whatever_the_names(host: str, name: str) -> None:
    one = Machine(host, gpus=(), nics=(), notes=(name,))
    text = (texts.TABS + texts.NAMES).replace("mlx5_3", name.split()[0] if name.split() else "x")
    from rdmakit.topology.assemble import assemble
    from rdmakit.topology.texts import read_texts

    drawn = draw(survey(replace(assemble(texts=read_texts({"a": text})), host=host), one))
    ET.fromstring(drawn)


def test_nvlinks_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(texts.TABS + texts.NAMES)
    svg = draw(survey(read_machines(tmp_path)[0].machine))
    assert "GPU0 - GPU1: NV4" in svg


def test_explanations(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path, acs=0x1C)
    one = found(tmp_path)
    fabric = survey(one).nodes[0].fabric
    near = "\n".join(explain(one, fabric, "GPU0", "mlx5_0:1"))
    assert "0000:19:00.0 -> 0000:17:01.0" in near
    assert "they meet at 0000:16:00.0" in near
    assert "63 GB/s" in near
    assert "400 Gb/s = 50 GB/s" in near
    assert "FAIL: ACS" in near
    far = "\n".join(explain(one, fabric, "gpu0", "mlx5_6"))
    assert "across the sockets" in far
    assert "from one host bridge to another" in far
    assert "nearer to GPU0: mlx5_0 (PIX)" in far
    peers = "\n".join(explain(one, fabric, "GPU0", "GPU5"))
    assert "P2P crosses the sockets" in peers
    with pytest.raises(InvalidArgument, match="GPU9"):
        explain(one, fabric, "GPU0", "GPU9")


def test_consumer_card_without_p2p(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("\tGPU0\tGPU1\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n")
    (tmp_path / "b").write_text(" \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n")
    (one,) = read_machines(tmp_path)
    lines = " ".join(explain(one.machine, survey(one.machine).nodes[0].fabric, "GPU0", "GPU1"))
    assert "staged through host memory" in lines
