"""A picture of the nodes as SVG: sockets, bridges, NICs, GPUs and NVLinks.

Written with the standard library's XML writer: a picture of boxes and lines needs no more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

from rdmakit.topology.clusters import Cluster, cluster_tree
from rdmakit.topology.cpulist import format_cpus
from rdmakit.topology.fabric import Fabric
from rdmakit.topology.model import Gpu, Machine, Nic
from rdmakit.topology.survey import Survey
from rdmakit.topology.words import Path

__all__ = ["draw"]

_COLUMN, _BOX, _LEAF = 138, 112, 58
"""Width of a column, of a device's box, and its height."""
_BAR, _STEP = 34, 62
"""Height of a bridge's box, and from one level to the next."""
_EDGE, _GAP = 24, 18
_FILL = {
    "socket": "#e8eaed",
    "numa": "#e8eaed",
    "host": "#fde9c8",
    "switch": "#fbd38d",
    "gpu": "#c6e5b3",
    "nic": "#bcd9f5",
    "spare": "#e3e3e3",
    "down": "#f6c6c1",
}
_LINE, _NVLINK = "#7a7f87", "#3f7d20"
_BAD_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def draw(survey: Survey) -> str:
    """Return an SVG document with one picture for each group of nodes that look alike."""
    pictures = []
    for group in survey.alike:
        node = survey.nodes[group[0]]
        names = ", ".join(survey.names[n] for n in group[:6])
        more = f" and {len(group) - 6} more" if len(group) > 6 else ""
        pictures.append(_Picture(node.machine, node.fabric, names + more).build())
    width = max([540.0, *(picture.width for picture in pictures)])
    height = sum(picture.height for picture in pictures) + 40
    root = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": f"{width:g}",
            "height": f"{height:g}",
            "viewBox": f"0 0 {width:g} {height:g}",
            "font-family": "Helvetica, Arial, sans-serif",
        },
    )
    ET.SubElement(root, "title").text = "Topology"
    ET.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
    top = 0.0
    for picture in pictures:
        picture.group.set("transform", f"translate(0 {top:g})")
        root.append(picture.group)
        top += picture.height
    _key(root, top + 14)
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


@dataclass
class _Drawn:
    group: ET.Element
    width: float
    height: float


def _clean(text: str) -> str:
    return _BAD_XML.sub("?", text)


def _fit(text: str, width: float, size: float) -> str:
    most = max(3, int(width / (size * 0.56)))
    return text if len(text) <= most else text[: most - 1] + "…"


class _Picture:
    """One machine while it is drawn."""

    def __init__(self, machine: Machine, fabric: Fabric, title: str) -> None:
        self._machine, self._fabric, self._title = machine, fabric, title
        self._svg = ET.Element("g")
        self._tree, self._lost = cluster_tree(machine)
        self._depth = _depth(self._tree)
        self._nic_y = 46.0 + self._depth * _STEP
        self._gpu_y = self._nic_y + (_LEAF + _GAP if machine.nics else 0)
        self._centers: dict[str, float] = {}

    def build(self) -> _Drawn:
        """Draw it and return it with its size."""
        self._text(_EDGE, 24, self._title, 15, bold=True, width=2000)
        x = float(_EDGE)
        sockets = []
        for child in self._tree.children:
            width = self._width(child)
            self._cluster(child, x, 0, width)
            sockets.append((x, width))
            x += width + _GAP
        for (a, a_width), (b, _) in pairwise(sockets):
            y = 46 + _BAR / 2
            self._line(a + a_width, y, b, y, 3)
        if self._lost:
            x = self._loose(x)
        if not self._centers:
            self._text(_EDGE, 60, "no GPU and no RDMA device", 12, width=2000)
        bottom = self._gpu_y + (_LEAF if self._machine.gpus else 0)
        if not self._machine.gpus and self._machine.nics:
            bottom = self._nic_y + _LEAF
        bottom = self._nvlinks(bottom)
        return _Drawn(self._svg, max(x, 320) + _EDGE, max(bottom, 80) + 26)

    # -- the tree ------------------------------------------------------------------------------

    def _width(self, cluster: Cluster) -> float:
        inner = sum(self._width(child) for child in cluster.children)
        inner += _GAP * max(0, len(cluster.children) - 1)
        own = self._columns(cluster.devices) * _COLUMN
        gap = _GAP if inner and own else 0
        return max(float(_COLUMN), inner + gap + own)

    def _columns(self, labels: Sequence[str]) -> int:
        gpus = sum(self._machine.gpu(label) is not None for label in labels)
        return max(gpus, len(labels) - gpus)

    def _cluster(self, cluster: Cluster, x: float, depth: int, width: float) -> None:
        y = 46.0 + depth * _STEP
        kind, title, below = self._words(cluster)
        self._box(x, y, width, _BAR, _FILL[kind], [title, below], tip=f"{title} {below}")
        at = x
        for child in cluster.children:
            child_width = self._width(child)
            middle = at + child_width / 2
            self._line(middle, y + _BAR, middle, y + _STEP, 1.5)
            self._cluster(child, at, depth + 1, child_width)
            at += child_width + _GAP
        self._leaves(cluster.devices, at, y + _BAR)

    def _leaves(self, labels: Sequence[str], x: float, top: float | None) -> None:
        """Draw devices in columns: NICs in the upper row, GPUs in the lower.

        ``top``: where the bridge above them ends; None: nothing is above them.
        """
        gpus = [gpu for label in labels if (gpu := self._machine.gpu(label)) is not None]
        nics = [nic for label in labels if (nic := self._machine.nic(label)) is not None]
        for place, nic in enumerate(nics):
            left = x + place * _COLUMN + (_COLUMN - _BOX) / 2 + 4
            if top is not None:
                self._line(left + _BOX / 2, top, left + _BOX / 2, self._nic_y, 1.5)
            self._nic(nic, left)
        for place, gpu in enumerate(gpus):
            left = x + place * _COLUMN + (_COLUMN - _BOX) / 2 + 4
            if top is not None:
                # Beside the NIC above it, not through it.
                side = left - 8 if place < len(nics) else left + _BOX / 2
                self._line(side, top, side, self._gpu_y + (14 if side < left else 0), 1.5)
                if side < left:
                    self._line(side, self._gpu_y + 14, left, self._gpu_y + 14, 1.5)
            self._gpu(gpu, left)

    def _words(self, cluster: Cluster) -> tuple[str, str, str]:
        if cluster.level is Path.NODE:
            node = next((n for n in self._machine.numa_nodes if n.index == cluster.numa), None)
            gpus = [gpu for m in cluster.members if (gpu := self._machine.gpu(m)) is not None]
            near = {format_cpus(gpu.cpus) if gpu.cpus else "" for gpu in gpus}
            cpus = format_cpus(node.cpus) if node is not None else ""
            cpus = cpus or (next(iter(near)) if len(near) == 1 else "")
            name = f"NUMA node {cluster.numa}" if cluster.numa is not None else "socket"
            return "numa", name, f"CPUs {cpus}" if cpus else ""
        title = {
            Path.PHB: "PCIe host bridge",
            Path.PXB: "PCIe switches",
            Path.PIX: "PCIe switch",
        }[cluster.level]
        slots = {(self._pci(label) or label).rpartition(".")[0] for label in cluster.members}
        if len(slots) == 1 and "" not in slots:
            title = "one card"
        link = next((d.link for d in self._machine.pci if d.address == cluster.bridge), None)
        below = " ".join(
            part for part in (cluster.bridge or "", link.describe() if link else "") if part
        )
        return ("host" if cluster.level is Path.PHB else "switch"), title, below

    def _pci(self, label: str) -> str | None:
        device = self._machine.gpu(label) or self._machine.nic(label)
        return device.pci if device is not None else None

    def _loose(self, x: float) -> float:
        width = max(1, self._columns(self._lost)) * _COLUMN
        self._text(x + 4, 40, "position not known", 11, width=width)
        self._leaves(self._lost, x, None)
        return x + width

    # -- devices -------------------------------------------------------------------------------

    def _gpu(self, gpu: Gpu, x: float) -> None:
        name = gpu.name.removeprefix("NVIDIA ").removeprefix("Tesla ")
        lines = [gpu.label, name, gpu.link.describe().partition(",")[0] or (gpu.pci or "")]
        if gpu.mig:
            lines[2] = f"{len(gpu.mig)} MIG devices"
        tip = " ".join(part for part in (gpu.label, gpu.name, gpu.uuid, gpu.pci or "") if part)
        self._box(x, self._gpu_y, _BOX, _LEAF, _FILL["gpu"], lines, tip=tip)
        self._centers[gpu.label] = x + _BOX / 2

    def _nic(self, nic: Nic, x: float) -> None:
        ports = [port for port in self._fabric.ports if port.nic == nic.label]
        down = bool(ports) and all(port.health.healthy is False for port in ports)
        role = ports[0].role if ports else "other"
        fill = "down" if down else "nic" if role == "compute" else "spare"
        rates = [f"{p.rate_gbps:g}" for p in ports if p.rate_gbps and p.health.healthy]
        state = "down" if down else f"{'/'.join(rates)} Gb/s" if rates else ""
        layer = next((port.link_layer for port in ports if port.link_layer), None)
        name = nic.name or nic.label
        first = name if name == nic.label else f"{nic.label} = {name}"
        short = {"InfiniBand": "IB", "Ethernet": "Ethernet"}.get(layer or "", layer or "")
        second = " ".join(part for part in (state, short) if part) or (nic.pci or "")
        lines = [first, second, role if role != "compute" else nic.link.describe()]
        tip = "; ".join(f"{port.title}: {port.reason} {port.health.why}" for port in ports)
        self._box(x, self._nic_y, _BOX, _LEAF, _FILL[fill], lines, tip=tip or name)
        self._centers[nic.label] = x + _BOX / 2

    def _nvlinks(self, bottom: float) -> float:
        """Draw NVLinks below the GPUs; return where the picture ends."""
        labels = [gpu.label for gpu in self._machine.gpus if gpu.label in self._centers]
        pairs = {
            (a, b): count
            for a, b in combinations(labels, 2)
            if (count := self._machine.matrix.nvlinks(a, b))
        }
        if not pairs:
            return bottom
        whole = len(pairs) == len(labels) * (len(labels) - 1) // 2
        even = len(set(pairs.values())) == 1
        # Too many arcs show nothing: a matrix that was cut in the middle.
        if even and ((whole and len(labels) > 2) or len(pairs) > 2 * len(labels)):
            where = "between any two GPUs" if whole else "between all pairs that are known"
            left = min(self._centers[label] for label in labels) - _BOX / 2
            right = max(self._centers[label] for label in labels) + _BOX / 2
            count = next(iter(pairs.values()))
            for label in labels:
                self._line(
                    self._centers[label], bottom, self._centers[label], bottom + 22, 3, _NVLINK
                )
            self._box(
                left,
                bottom + 22,
                right - left,
                28,
                "#dff0d3",
                [f"NVLink: NV{count} {where}"],
                tip="NVLink",
            )
            return bottom + 50
        return self._arcs(pairs, bottom)

    def _arcs(self, pairs: dict[tuple[str, str], int], bottom: float) -> float:
        widest = 0.0
        for (a, b), count in sorted(pairs.items(), key=lambda item: -self._span(item[0])):
            start, end = self._centers[a], self._centers[b]
            sag = 26 + 0.17 * abs(end - start)
            widest = max(widest, sag)
            path = (
                f"M {start:g} {bottom:g} Q {(start + end) / 2:g} {bottom + 2 * sag:g} "
                f"{end:g} {bottom:g}"
            )
            element = ET.SubElement(
                self._svg,
                "path",
                {
                    "d": path,
                    "fill": "none",
                    "stroke": _NVLINK,
                    "stroke-width": f"{min(1.0 + 0.6 * count, 6):g}",
                    "stroke-opacity": "0.7",
                },
            )
            ET.SubElement(element, "title").text = f"{a} - {b}: NV{count}"
            self._text((start + end) / 2 - 10, bottom + sag + 4, f"NV{count}", 10, width=60)
        return bottom + widest + 14

    def _span(self, pair: tuple[str, str]) -> float:
        return abs(self._centers[pair[0]] - self._centers[pair[1]])

    # -- shapes --------------------------------------------------------------------------------

    def _line(
        self, x1: float, y1: float, x2: float, y2: float, width: float, colour: str = _LINE
    ) -> None:
        place = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
        ET.SubElement(self._svg, "line", {**place, "stroke": colour, "stroke-width": f"{width:g}"})

    def _box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        lines: Sequence[str],
        *,
        tip: str,
    ) -> None:
        group = ET.SubElement(self._svg, "g")
        ET.SubElement(group, "title").text = _clean(tip)
        place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
        ET.SubElement(group, "rect", {**place, "rx": "4", "fill": fill, "stroke": "#5f6368"})
        shown = [line for line in lines if line]
        step = min(15.0, (height - 4) / max(1, len(shown)))
        top = y + (height - step * len(shown)) / 2 + step * 0.75
        for place_, line in enumerate(shown):
            self._text(
                x + 6,
                top + place_ * step,
                line,
                11 if place_ == 0 else 9.5,
                bold=place_ == 0,
                width=width - 12,
                parent=group,
            )

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        *,
        width: float,
        bold: bool = False,
        parent: ET.Element | None = None,
    ) -> None:
        element = ET.SubElement(
            self._svg if parent is None else parent,
            "text",
            {
                "x": f"{x:g}",
                "y": f"{y:g}",
                "font-size": f"{size:g}",
                "fill": "#202124",
                **({"font-weight": "bold"} if bold else {}),
            },
        )
        element.text = _fit(_clean(text), width, size)


def _depth(cluster: Cluster) -> int:
    """Return the rows of boxes that a tree needs, the whole machine's not counted."""
    return max((1 + _depth(child) for child in cluster.children), default=0)


def _key(root: ET.Element, y: float) -> None:
    """Draw what the colours mean."""
    entries = (
        ("gpu", "GPU"),
        ("nic", "compute NIC"),
        ("spare", "other NIC"),
        ("down", "port down"),
        ("switch", "PCIe switch"),
        ("host", "host bridge"),
    )
    x = float(_EDGE)
    for kind, text in entries:
        ET.SubElement(
            root,
            "rect",
            {
                "x": f"{x:g}",
                "y": f"{y - 9:g}",
                "width": "12",
                "height": "10",
                "fill": _FILL[kind],
                "stroke": "#5f6368",
            },
        )
        label = ET.SubElement(
            root, "text", {"x": f"{x + 17:g}", "y": f"{y:g}", "font-size": "10", "fill": "#202124"}
        )
        label.text = text
        x += 30 + 6.2 * len(text)
