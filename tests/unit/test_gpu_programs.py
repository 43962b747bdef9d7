"""What the programs of the GPU tests import from the other tests is there: no GPU is needed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "gpu").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_imports(file: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        package = node.module.partition(".")[0]
        if package not in ("tests", "rdmakit") or node.module.startswith("tests.gpu"):
            continue
        module = importlib.import_module(node.module)
        for alias in node.names:
            if hasattr(module, alias.name):
                continue
            try:
                importlib.import_module(f"{node.module}.{alias.name}")
            except ImportError:
                missing.append(f"{node.module}.{alias.name}")
    assert not missing, f"{file.name} imports what is not there: {missing}"
