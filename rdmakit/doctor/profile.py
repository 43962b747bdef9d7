"""Values that are expected of a type of machine, in data files that a site can add to.

A profile is a TOML file: ``[match]`` says which machines it is for, ``[expect]`` what they have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Profile"]


@dataclass(frozen=True)
class Profile:
    """Expected values; empty where nothing is known of this type of machine."""

    name: str = ""
    expect: dict[str, object] = field(default_factory=dict)
