"""Who imports whom: the engines' package never the daemon's, and what starts fast neither torch nor numpy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sharedmirror
import sharedmirrord

CLIENT = Path(sharedmirror.__file__).parent
DAEMON = Path(sharedmirrord.__file__).parent
SHARED_WITH_DAEMON = {"sharedmirror.types", "sharedmirror.wire", "sharedmirror.errors", "sharedmirror.paths"}


def imports(path: Path) -> Iterator[str]:
    """Yield the absolute names of modules, and of names taken from packages, that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(root: Path) -> list[Path]:
    found = sorted(root.rglob("*.py"))
    assert found
    return found


def test_the_clients_package_never_imports_the_daemon() -> None:
    for path in files(CLIENT):
        assert [name for name in imports(path) if name.split(".")[0] == "sharedmirrord"] == [], path


def test_the_daemon_takes_only_types_wire_errors_and_paths() -> None:
    for path in files(DAEMON):
        for name in imports(path):
            if name.split(".")[0] == "sharedmirror" and name != "sharedmirror.__version__":
                assert ".".join(name.split(".")[:2]) in SHARED_WITH_DAEMON, f"{path} imports {name}"


def test_the_core_has_no_sockets_clocks_files_or_chance() -> None:
    allowed = {
        "__future__",
        "array",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "heapq",
        "hmac",
        "itertools",
        "typing",
    }
    for path in files(DAEMON / "core"):
        for name in imports(path):
            top = name.split(".")[0]
            inside = name.startswith("sharedmirrord.core") or top == "sharedmirror"
            assert inside or top in allowed, f"{path} imports {name}"


LOADED = "import json, sys; {}; print(json.dumps(sorted(m for m in sys.modules if '.' not in m)))"


def loaded(statement: str) -> set[str]:
    line = [sys.executable, "-c", LOADED.format(statement)]
    return set(json.loads(subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout))


@pytest.mark.parametrize(
    "module",
    [
        "sharedmirror", "sharedmirror.control", "sharedmirror.channel", "sharedmirror.cli", "sharedmirror.layout",
        "sharedmirrord.cli", "sharedmirrord.server",
    ],
)  # fmt: skip
def test_neither_torch_nor_numpy_is_loaded(module: str) -> None:
    found = loaded(f"import {module}")
    assert module.split(".")[0] in found
    assert found & {"torch", "numpy", "cuda"} == set()


def test_connect_is_had_without_torch() -> None:
    found = loaded("import sharedmirror; sharedmirror.connect; sharedmirror.watch")
    assert found & {"torch", "numpy", "sharedmirrord"} == set()


def test_the_clients_control_side_loads_neither_the_daemon_nor_its_libraries() -> None:
    found = loaded("import sharedmirror.control")
    assert found & {"sharedmirrord", "uvloop", "typer", "posix_ipc", "prometheus_client", "rich"} == set()
