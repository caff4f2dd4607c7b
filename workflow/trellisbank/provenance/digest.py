# SPDX-License-Identifier: Apache-2.0
"""A digest of the code that a rule depends on, so that changed code reruns and a comment does not.

The digest covers a rule's script and, transitively, every module of this package that it imports.
Modules are parsed, never imported; comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from blake3 import blake3

PACKAGE = Path(__file__).resolve().parents[1]


def code_digest(script: str | Path) -> str:
    """Return the BLAKE3 hash (hex) of a script and its import closure within the package.

    Args:
        script: Python file; itself and what it imports from `trellisbank` count.
    """
    script = Path(script).resolve()
    hasher = blake3()
    for path in sorted(_closure(script) - {script}):
        hasher.update(f"{path.relative_to(PACKAGE)}\0{_dump(path)}\0".encode())
    hasher.update(f"{script.name}\0{_dump(script)}".encode())
    return hasher.hexdigest()


def _closure(path: Path) -> set[Path]:
    found = {path}
    left = [path]
    while left:
        for imported in _imports(left.pop()):
            if imported not in found:
                found.add(imported)
                left.append(imported)
    return found


@cache
def _imports(path: Path) -> frozenset[Path]:
    return frozenset(_modules(ast.parse(path.read_bytes())))


def _modules(tree: ast.Module) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != PACKAGE.name:
                continue
            for depth in range(1, len(parts) + 1):
                base = PACKAGE.joinpath(*parts[1:depth])
                for path in (base.with_suffix(".py"), base / "__init__.py"):
                    if path.is_file():
                        yield path


@cache
def _dump(path: Path) -> str:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
            and isinstance(node.body[0].value, ast.Constant)
            and isinstance(node.body[0].value.value, str)
        ):
            node.body.pop(0)
    return ast.dump(tree)
