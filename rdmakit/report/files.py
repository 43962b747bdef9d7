"""Result files: .json (whole), .jsonl (a line each), .csv (rows only)."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from rdmakit.errors import InvalidArgument, OutputError
from rdmakit.pretty import pretty_json

__all__ = ["FORMATS", "ResultFile"]

FORMATS = (".json", ".jsonl", ".csv")
_EVERY = 0.2


class ResultFile:
    """Keeps a file up to date while a run goes on, so that a killed run leaves what it had.

    The file is replaced as a whole each time; a reader never sees half of it.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in FORMATS:
            raise InvalidArgument(f"{path}: name ends in {', '.join(FORMATS)}")
        self._path, self._written = path, 0.0

    def update(self, result: msgspec.Struct, *, final: bool = False) -> None:
        """Write ``result`` (fields environment and rows), at most five times a second.

        Raises:
            OutputError: the file cannot be written.
        """
        now = time.monotonic()
        if not final and now - self._written < _EVERY:
            return
        self._written = now
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        data = self._encoded(msgspec.to_builtins(result))
        try:
            try:
                temporary.write_bytes(data)
                temporary.replace(self._path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as exc:
            text = f"{self._path}: cannot be written: {exc.strerror or exc}"
            raise OutputError(text) from exc

    def _encoded(self, data: dict[str, Any]) -> bytes:
        if self._path.suffix == ".json":
            return pretty_json(data).encode()
        if self._path.suffix == ".jsonl":
            head = {key: value for key, value in data.items() if key != "rows"}
            lines = [head, *data["rows"]]
            return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        rows = [_flat(row) for row in data["rows"]]
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines_: list[str] = []

        class _Sink:
            def write(self, text: str) -> int:
                lines_.append(text)
                return len(text)

        writer = csv.DictWriter(_Sink(), names)
        writer.writeheader()
        writer.writerows(rows)
        return "".join(lines_).encode()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "time_us":
            for part in ("min", "median", "p95", "p99", "max"):
                flat[f"time_us_{part}"] = None if value is None else value[part]
        else:
            flat[name] = value
    return flat
