"""Texts as people paste them: escapes, line ends, launcher labels and comment marks taken off."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Unread", "clean", "lines_of"]

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_LABEL = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err|diag)>:|\[\d+\] (?=\s*(?:GPU|NIC|mlx)))")
_MOST = 64 << 20
"""Characters: longer texts are not read."""


def clean(text: str) -> str:
    """Return ``text`` without terminal escapes, byte-order mark, CR and launcher labels."""
    text = _ESCAPES.sub("", text[:_MOST])
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    # One blank: a no-break space is what web pages make of it.
    return text.replace("\u00a0", " ").replace("\0", "")


def lines_of(text: str) -> list[str]:
    """Return the lines of a cleaned text, labels of launchers and quote marks taken off."""
    return [re.sub(r"^> ?", "", _LABEL.sub("", line)) for line in clean(text).split("\n")]


@dataclass(frozen=True)
class Unread:
    """A line that belongs to what was parsed and was not understood."""

    line: int
    text: str
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.why}: {self.text.strip()[:80]!r}"
