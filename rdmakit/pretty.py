"""JSON for people and programs: what every output and collected file is written as."""

from __future__ import annotations

import msgspec

__all__ = ["pretty_json"]


def pretty_json(value: object) -> str:
    """Return ``value`` as JSON with a line for each entry. Pure.

    Args:
        value: of JSON's types, or msgspec structs of them.
    """
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"
