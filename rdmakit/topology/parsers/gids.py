"""GID tables: ``show_gids``, and which entry RoCE traffic should use."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rdmakit.topology.model import Gid, Port
from rdmakit.topology.text import lines_of

__all__ = ["GidTables", "address_of", "choose_gid", "gid_table", "parse_show_gids"]

_VERSIONS = {"v1": "RoCE v1", "v2": "RoCE v2"}


@dataclass(frozen=True)
class GidTables:
    """GIDs by (device, port)."""

    tables: dict[tuple[str, int], tuple[Gid, ...]]
    announced: int | None = None
    """``n_gids_found`` of the text."""

    @property
    def count(self) -> int:
        """Number of GIDs read."""
        return sum(len(table) for table in self.tables.values())


def parse_show_gids(text: str) -> GidTables:
    """Return the tables that ``show_gids`` printed; empty for another text. Never raises."""
    tables: dict[tuple[str, int], list[Gid]] = {}
    announced: int | None = None
    for line in lines_of(text):
        match = re.match(
            r"\s*(\S+)\s+(\d{1,3})\s+(\d{1,5})\s+([0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){2,7})"
            r"(?:\s+\d+\.\d+\.\d+\.\d+)?(?:\s+(v\d))?(?:\s+(\S+))?\s*$",
            line,
            re.ASCII,
        )
        if match:
            gid = Gid(int(match[3]), match[4].lower(), _VERSIONS.get(match[5] or ""), match[6])
            tables.setdefault((match[1], int(match[2])), []).append(gid)
        elif match := re.search(r"n_gids_found\s*=\s*(\d{1,9})", line, re.ASCII):
            announced = int(match[1])
    return GidTables({key: tuple(table) for key, table in tables.items()}, announced)


def address_of(gid: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in a GID; IPv4 where it is a mapped one."""
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return None
    return address.ipv4_mapped or address


def choose_gid(port: Port) -> tuple[int | None, str]:
    """Return the GID index to use on a port and why; None where no entry serves.

    RoCE: the first RoCE v2 entry with a routable address, IPv4 before IPv6. Index 3 is what
    mlx5 devices with one IPv4 address have there, no rule.
    """
    if port.link_layer == "InfiniBand":
        return 0, "InfiniBand uses the port's first GID"
    if not port.gids:
        return None, "the GID table is not known"
    second = [gid for gid in port.gids if gid.kind == "RoCE v2"]
    if not second:
        kinds = sorted({gid.kind or "of unknown type" for gid in port.gids})
        return None, f"no RoCE v2 GID; there are GIDs {', '.join(kinds)}"
    for version in (4, 6):
        for gid in second:
            address = address_of(gid.gid)
            usable = address is not None and address.version == version
            if address and usable and not (address.is_link_local or address.is_unspecified):
                return gid.index, f"RoCE v2, {address}"
    return None, "only link-local RoCE v2 GIDs: give its net device an IP address"


def gid_table(gids: Sequence[Gid]) -> str:
    """Return the shape of a table, equal on hosts that are set up alike: no addresses in it."""

    def kinds() -> Iterable[str]:
        for gid in gids:
            address = address_of(gid.gid)
            sort = "?"
            if address is not None:
                sort = "link-local" if address.is_link_local else f"IPv{address.version}"
            yield f"{gid.index}:{gid.kind or '?'} {sort}"

    return ", ".join(kinds())
