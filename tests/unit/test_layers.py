"""The rules of the tree, read from the source: imports go down, vendor libraries stay inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "pipelines").rglob("*.py"))

# Lower may not import higher; rooms of one level may import each other only where ALLOWED says so.
LEVEL = {
    "errors": -1, "config": 0, "flow": 1,
    "intake": 2, "divergence": 2, "quantize": 3, "engine": 4, "evaluate": 5, "probe": 5, "decide": 5,
    "track": 6, "release": 6,
    "compose": 1, "workload": 6, "entries": 6, "campaign": 7, "stages": 8, "assembly": 9, "conduct": 10, "terminal": 7,
    "cli": 11, "verbs": 12, "radar": 1, "moved": 6, "promoted": 9, "reassembly": 10,
}  # fmt: skip
# What each side may know of a neighbour of its own level.
ALLOWED = {("decide", "probe"): {"pipelines.probe.latency"}, ("release", "track"): None, ("track", "release"): None}
VENDORS = {
    "torch", "transformers", "onnx", "onnxruntime", "onnxruntime_genai", "onnx_ir", "llmcompressor",
    "compressed_tensors", "gptqmodel", "lm_eval", "datasets", "mlflow", "pandas", "matplotlib", "huggingface_hub",
    "gguf", "optimum", "awq", "auto_gptq",
    "mobius", "tensorrt_rtx",
}  # fmt: skip
ONLY_IN = {"mlflow": {"track", "release"}}
# Only a stage's process imports these, from inside a function; they may open their vendor at once.
BEHIND_A_FUNCTION = {"pipelines/evaluate/adapter.py"}
BANNED_NAMES = {"utils", "common", "helpers", "base", "manager"}


def room(path: Path) -> str:
    return path.relative_to(ROOT / "pipelines").parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def at_import_time(tree: ast.Module) -> Iterator[str]:
    """What a module imports when it is imported: top level, not in functions nor under TYPE_CHECKING."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += node.body


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    """A room imports only rooms below it, and a neighbour only where that is agreed."""
    here = room(path)
    if here == "__init__":
        return
    for module, _ in imports(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[0] != "pipelines" or len(parts) < 2 or parts[1] == here:
            continue
        there = parts[1]
        if LEVEL[there] == LEVEL[here] and (here, there) in ALLOWED:
            known = ALLOWED[here, there]
            assert known is None or module in known, f"{path} knows too much of {module}"
            continue
        assert LEVEL[there] < LEVEL[here], f"{path} imports {module}, which is not below it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_vendor_libraries_are_imported_inside_functions(path: Path) -> None:
    """Importing any module of ours loads no vendor library."""
    if str(path.relative_to(ROOT)) in BEHIND_A_FUNCTION:
        return
    loaded = {module.split(".")[0] for module in at_import_time(ast.parse(path.read_text()))}
    assert set() == loaded & VENDORS


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_tracking_rooms_know_mlflow(path: Path) -> None:
    """mlflow is imported by track and release alone."""
    for module, _ in imports(ast.parse(path.read_text())):
        for vendor, rooms in ONLY_IN.items():
            assert module.split(".")[0] != vendor or room(path) in rooms


def test_no_file_has_a_name_that_means_nothing() -> None:
    """utils, common, helpers, base and manager are not names."""
    assert [] == [p for p in SOURCES if p.stem in BANNED_NAMES or p.parent.name in BANNED_NAMES]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_can_be_read_in_one_sitting(path: Path) -> None:
    """No module is longer than 400 lines, and each opens with a docstring."""
    text = path.read_text()
    assert text.count("\n") <= 400
    assert ast.get_docstring(ast.parse(text))


def test_the_command_line_loads_nothing_heavy() -> None:
    """`quantgate --help` and everything `plan` imports load no vendor library, numpy or pandas included."""
    code = (
        "import sys, pipelines.cli, pipelines.verbs.campaign, pipelines.verbs.store\n"
        f"print(sorted(set({sorted(VENDORS | {'numpy', 'scipy', 'pyarrow'})!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "[]" == done.stdout.strip()
