"""Who may import whom. ``WALLS`` is the rule, and the tests hold the code to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIG = {"torch", "ray", "hydra", "omegaconf", "mlflow"}

# A room is a module or a package below `orchestrator`, without the rooms inside it that have a line of their own.
# It may import itself, the rooms listed, which all stand above it, and the big libraries listed; (in brackets)
# inside functions and for type checking only. Whatever is not listed is a wall, also for imports inside functions.
WALLS = {
    # room              ours                                                                   big libraries
    "config":           ("",                                                                   ""),
    "config.overrides": ("config",                                                             "hydra"),
    "config.compose":   ("config config.overrides",                                            "hydra omegaconf"),
    "config.help":      ("config config.overrides config.compose",                             ""),
    "events":           ("",                                                                   ""),
    "rundir":           ("",                                                                   ""),
    "chaos":            ("",                                                                   ""),
    "mesh":             ("",                                                                   "(torch)"),
    "schedules":        ("",                                                                   ""),
    "spans":            ("",                                                                   ""),
    "schedule_model":   ("spans",                                                              ""),
    "timeline":         ("rundir spans",                                                       ""),
    "model.cut":        ("config",                                                             ""),
    "model":            ("config model.cut",                                                   "torch"),
    "job":              ("config",                                                             "(torch)"),
    "plan":             ("chaos config mesh schedules",                                        ""),
    "figures":          ("",                                                                   ""),
    "messages":         ("chaos config events figures plan spans",                             ""),
    "report":           ("events plan",                                                        ""),
    "tracking":         ("config events rundir report",                                        "(mlflow)"),
    "worker.state":     ("",                                                                   "torch"),
    "worker.transfer":  ("worker.state",                                                       "torch"),
    "worker.data":      ("job mesh",                                                           "torch"),
    "strategies":       ("config events figures mesh schedules spans job model model.cut worker.state "
                         "worker.transfer worker.data",                                        "torch"),
    "worker":           ("chaos config events figures rundir spans job messages strategies worker.state "
                         "worker.data",                                                        "torch"),
    "worker.actor":     ("rundir job messages strategies worker",                              "torch ray"),
    "driver":           ("chaos config config.compose events figures rundir job mesh model model.cut plan messages "
                         "tracking spans schedule_model worker worker.state worker.actor",              "torch ray"),
    "session":          ("config config.compose events rundir job plan report timeline tracking "
                         "driver",                                                             "torch"),
    "launch":           ("config config.overrides config.compose config.help report session",  ""),
    "sync":             ("rundir tracking",                                                    ""),
    "compare":          ("rundir report tracking",                                             ""),
    "jobs":             ("job",                                                                "torch"),
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """``when``: as the module is imported, inside a function, or for type checking only."""

    source: str
    target: str
    when: Literal["at once", "in a function", "for types"]
    line: int

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}"


@cache
def files() -> dict[str, Path]:
    found = {}
    for path in sorted([*ROOT.glob("orchestrator/**/*.py"), *ROOT.glob("jobs/**/*.py")]):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(i for name, path in files().items() for i in _imports_of(name, ast.parse(path.read_text())))


def _imports_of(name: str, tree: ast.Module) -> Iterator[Import]:
    def visit(node: ast.AST, when: Literal["at once", "in a function", "for types"]) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, when, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: relative imports are not used here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(name, inner if inner in files() else str(node.module), when, node.lineno)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            when = "in a function" if when == "at once" else when
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            when = "for types"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    return visit(tree, "at once")


def room_of(module: str) -> str | None:
    """The room that a module of ours lies in; None for the public face ``orchestrator`` and for other people's."""
    if module.split(".")[0] == "jobs":
        return "jobs"
    inside = module.removeprefix("orchestrator.")
    rooms = [r for r in WALLS if inside == r or inside.startswith(f"{r}.")]
    return max(rooms, key=len) if rooms and module != inside else None


def may_import(room: str) -> set[str]:
    return {room, *WALLS[room][0].split()}


def test_every_module_lies_in_a_room() -> None:
    for module in files():
        assert module == "orchestrator" or room_of(module), f"{module}: give it a line in WALLS"
    for room in WALLS:
        assert any(room_of(m) == room for m in files()), f"{room}: nothing lies there; take its line out of WALLS"


def test_rooms_import_only_rooms_above_them() -> None:
    order = list(WALLS)
    for room in order:
        below = [r for r in may_import(room) - {room} if order.index(r) > order.index(room)]
        assert not below, f"{room} may import {below}: those stand below it, so there would be a way round in a circle"


@pytest.mark.parametrize("room", WALLS)
def test_a_room_imports_only_what_the_walls_allow(room: str) -> None:
    broken = [
        f"{i} ({i.when}): {room} may not import {i.target}; of ours it may import {sorted(may_import(room))}"
        for i in imports()
        if room_of(i.source) == room and room_of(i.target) not in (None, *may_import(room))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("room", WALLS)
def test_a_room_knows_only_its_own_big_libraries(room: str) -> None:
    allowed = WALLS[room][1].split()
    broken = [
        f"{i} ({i.when}): {room} may not import {library}; it may import: {', '.join(allowed) or 'none'}"
        for i in imports()
        if room_of(i.source) == room
        and (library := i.target.split(".")[0]) in BIG
        and library not in allowed
        and not (i.when != "at once" and f"({library})" in allowed)
    ]
    assert not broken, "\n".join(broken)


def test_every_permission_is_used() -> None:
    """So that the table says what is, not what once was."""
    unused = []
    for room, (ours, libraries) in WALLS.items():
        targets = [i.target for i in imports() if room_of(i.source) == room]
        used = {room_of(t) for t in targets} | {t.split(".")[0] for t in targets}
        unused += [f"{room}: {word}" for word in f"{ours} {libraries}".split() if word.strip("()") not in used]
    assert not unused, f"take these out of WALLS: {unused}"


def at_once() -> dict[str, set[str]]:
    """What each module imports as it is imported itself, its packages' ``__init__`` among it."""
    graph: dict[str, set[str]] = {m: set() for m in files()}
    for i in imports():
        if i.when == "at once":
            graph[i.source].add(i.target)
    return graph


def test_no_circles() -> None:
    graph = at_once()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in graph and module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def loads(module: str) -> set[str]:
    """The big libraries that come with ``import module``."""
    graph, seen, ahead = at_once(), set(), [module]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += [*graph.get(name, ()), *([name.rpartition(".")[0]] if "." in name else [])]
    return seen & BIG


@pytest.mark.parametrize(
    ("module", "libraries", "why"),
    [
        ("orchestrator", set(), "`import orchestrator` is quick"),
        ("orchestrator.launch", set(), "--help is quick"),
        ("orchestrator.config.help", {"hydra", "omegaconf"}, "--help is quick"),
        ("orchestrator.worker.actor", {"torch", "ray"}, "a worker starts without Hydra and MLflow"),
        ("orchestrator.strategies", {"torch"}, "a strategy is plain torch"),
        ("jobs.digits", {"torch"}, "a job is plain torch"),
        ("jobs.gpt", {"torch"}, "a job is plain torch"),
        ("orchestrator.tracking.follower", set(), "the uploading process starts quickly and is small"),
        ("orchestrator.driver.session", {"torch", "ray", "hydra", "omegaconf"}, "MLflow's slow import delays no start"),
    ],
)
def test_what_comes_with_an_import(module: str, libraries: set[str], why: str) -> None:
    assert loads(module) <= libraries, why
