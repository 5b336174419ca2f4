"""Every benchmark script imports, and every name that it imports exists, also inside its functions."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Ray Train is imported by two peers only and takes seconds; their other imports are checked without running them.
RESOLVE_IMPORTS = """
import ast, importlib, sys
from pathlib import Path

def exists(module, name):
    try:
        if name is not None and hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(module if name is None else f"{module}.{name}")
    except ImportError:
        return False
    return True

root = Path(sys.argv[1])
folder = root / "benchmarks"
folders = [root, root / "tests", root / "docs/examples", folder, folder / "peers"]
sys.path[:0] = map(str, folders)  # as models.py and ports.py do
for script in sorted(folder.glob("**/[a-z]*.py")):
    if script.name == "sitecustomize.py":  # not imported by name
        continue
    imports = []
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imports += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.module, alias.name) for alias in node.names]
    checked = [entry for entry in imports if not entry[0].startswith("ray.train")]
    missing = [f"{script.name}: {module} {name or ''}" for module, name in checked if not exists(module, name)]
    print(*missing, sep="\\n", end="\\n" if missing else "")
    if not missing and checked == imports:
        importlib.import_module(".".join(script.relative_to(folder).with_suffix("").parts))
"""


@pytest.mark.campaign
def test_every_benchmark_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE_IMPORTS, str(ROOT)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
