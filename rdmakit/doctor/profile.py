"""Values that are expected of a type of machine, in data files that a site can add to.

A profile is a TOML file: ``[match]`` says which machines it is for, ``[expect]`` what they have.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from rdmakit.errors import InvalidArgument

__all__ = ["Profile", "load_profile"]


@dataclass(frozen=True)
class Profile:
    """Expected values; empty where nothing is known of this type of machine."""

    name: str = ""
    expect: dict[str, object] = field(default_factory=dict)


def load_profile(path: Path) -> Profile:
    """Return the profile in a TOML file.

    Raises:
        InvalidArgument: it cannot be read, or is not TOML with a table ``expect``.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InvalidArgument(f"--profile {path}: {exc}") from exc
    expect = data.get("expect", {})
    if not isinstance(expect, dict):
        raise InvalidArgument(f"--profile {path}: [expect] must be a table")
    return Profile(str(data.get("name", path.stem)), expect)
