"""House rules that a machine can check, one test a rule."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["common", "accounts", "billing", "engine", "kernels", "api", "web", "infra"]
LONGEST_FUNCTION = 70
LONGEST_KERNEL = 110
"""A Triton kernel is one function, and has a parameter a line."""
DURATIONS_ONLY = {
    "settings.py",
    "stripe_settings.py",
    "celery_app.py",
    "holds.py",
    "writer_queue.py",
}
"""Modules of billing whose floats are seconds."""


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources("billing"), ids=named)
def test_no_float_touches_money(path: Path) -> None:
    if path.name in DURATIONS_ONLY:
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not _touches_float(node), f"{named(path)}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=named)
def test_the_environment_is_read_by_settings_only(path: Path) -> None:
    if path.parts[-2:] == ("infra", "bootstrap.py"):
        return  # runs before anything is installed
    for node in ast.walk(ast.parse(path.read_text())):
        reads = isinstance(node, ast.Attribute) and node.attr == "getenv"
        assert not reads, f"{named(path)}:{node.lineno} reads the environment"


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=named)
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    for name, node in _functions(ast.parse(path.read_text())):
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        is_kernel = any("jit" in ast.dump(decorator) for decorator in node.decorator_list)
        longest = LONGEST_KERNEL if is_kernel else LONGEST_FUNCTION
        assert length <= longest, f"{named(path)}:{node.lineno} {name}: {length} lines"


def _touches_float(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float)
    if isinstance(node, ast.Name):
        return node.id == "float"
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _functions(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
