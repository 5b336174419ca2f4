"""Who may import whom. ``RULES`` is the architecture, and the tests hold the code to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = {"torch", "ray", "hydra", "omegaconf", "mlflow", "pyarrow", "fsspec"}

# A row is a package, or a module directly below `orchestrator`; `verbs` are the modules that `python -m` runs.
# A package inside a package has a row of its own where it has rules of its own.
# Each may import itself, the packages listed, which all stand above it, and the libraries listed; (in brackets)
# inside functions and for type checking only. Everything else is refused, also inside functions.
RULES = {
    # package       ours                                                                       libraries
    "version":      ("",                                                                       ""),
    "features":     ("",                                                                       ""),
    "user_code":    ("",                                                                       "(torch)"),
    "script_api":   ("",                                                                       ""),
    "job":          ("user_code",                                                              "(torch)"),
    "compat":       ("",                                                                   "hydra torch ray omegaconf"),
    "storage":      ("",                                                                       "(pyarrow)"),
    "config":       ("features user_code job compat",                                          "hydra omegaconf"),
    "planning":     ("config",                                                                 ""),
    "timeline":     ("",                                                                       ""),
    "protocol":     ("storage config planning timeline",                                       ""),
    "records":      ("storage protocol",                                                       ""),
    "state":        ("planning compat storage",                                                "torch"),
    "model":        ("user_code config planning compat",                                       "torch"),
    "model.stages":  ("user_code config compat model",                                         "torch"),
    "model.tensor":  ("planning compat model",                                                 "torch"),
    "model.context": ("compat model",                                                          "torch"),
    "model.proofs":  ("compat model model.tensor model.context",                               "torch"),
    "strategies.measure": ("user_code job compat state model",                                 "torch"),
    "strategies.data":    ("user_code job config compat model",                                "torch"),
    "strategies.update":  ("user_code job config planning compat state model strategies.data",           "torch"),
    "strategies":   ("features user_code job config planning timeline protocol compat state model model.stages "
                     "model.tensor model.context model.proofs strategies.measure strategies.data "
                     "strategies.update",                                                      "torch"),
    "features.asynchronous": ("user_code job config planning protocol compat state model model.stages "
                     "strategies.measure strategies.data strategies.update strategies",        "torch"),
    "policy":       ("config planning timeline protocol",                                      ""),
    "display":      ("features config planning protocol records",                              ""),
    "worker.process": ("features storage protocol records",                                    "torch"),
    "worker.control": ("config planning protocol compat strategies worker.process",            "torch"),
    "worker.measure": ("timeline protocol compat strategies.measure worker.process worker.control", "torch"),
    "worker.data":    ("user_code job config planning protocol records compat state model strategies "
                       "strategies.data worker.control",                                       "torch"),
    "worker.reports": ("user_code job config protocol records compat state strategies "
                       "strategies.measure worker.process worker.control worker.measure",      "torch"),
    "worker":         ("user_code job config protocol records compat state model strategies "
                       "strategies.measure strategies.data strategies.update worker.process "
                       "worker.control worker.measure worker.data worker.reports", "torch ray"),
    "features.feeding": ("user_code job config protocol compat strategies.data worker worker.data", "ray"),
    "driver.process": ("features user_code config planning timeline protocol records compat policy", "ray"),
    "driver.code":    ("user_code job config planning protocol compat display worker.process "
                       "driver.process",                                                       "ray"),
    "driver.reporting": ("storage config protocol records compat "
                       "driver.process",                                                       "ray"),
    "driver.nodes":   ("storage config planning protocol records compat policy worker.process "
                       "driver.process driver.code",                                           "ray"),
    "driver.preflight": ("user_code job storage config planning records compat state strategies "
                       "strategies.data strategies.update policy driver.process "
                       "driver.code",                                                          "torch"),
    "driver.gang":    ("planning protocol compat policy worker.process worker driver.process driver.code "
                       "driver.nodes",                                                         "ray"),
    "driver.run":     ("storage planning protocol records state strategies policy display "
                       "worker.process worker.control worker driver.process driver.code driver.reporting driver.nodes "
                       "driver.gang",                                             "ray"),
    "driver.debug":   ("user_code planning protocol strategies policy display worker driver.process "
                       "driver.code driver.reporting driver.gang driver.run",                  ""),
    "driver":         ("features job config planning timeline protocol records compat state strategies "
                       "policy display driver.process driver.code driver.reporting driver.nodes "
                       "driver.preflight driver.run driver.debug",    "torch ray"),
    "verbs":          ("features user_code storage config records strategies display "
                       "driver.process driver.reporting driver.preflight "
                       "driver",                                                               ""),
    "features.doctor": ("config storage planning protocol compat strategies.measure strategies policy display "
                       "worker.process worker.control driver.process driver.code driver.nodes driver.preflight driver "
                       "verbs",                                                                "torch ray"),
    "features.export": ("user_code job compat config planning records state model strategies.data display verbs",
                                                                                               "torch mlflow"),
    "features.plan.prediction": ("config planning",                                            ""),
    "features.plan":   ("job config planning timeline records compat model strategies strategies.measure display "
                       "driver.preflight features.plan.prediction verbs",                      "torch"),
    "features.auto":   ("features job config planning records strategies policy display driver.process "
                       "driver.preflight driver features.plan features.plan.prediction",       "torch"),
    "features.batch_size": ("config planning strategies display driver.process driver.preflight driver verbs", ""),
    "features.tracking": ("storage config planning protocol records display driver.process",   "(mlflow) (torch)"),
    "features.sweep":  ("user_code storage config planning protocol records state strategies display "
                       "driver.process driver.preflight driver verbs features features.tracking", ""),
    "features.queue":  ("config storage planning protocol records compat policy display driver.process verbs",
                                                                                               "ray"),
    "features.scripts": ("user_code job config planning protocol records script_api strategies policy worker.process "
                       "worker.control worker display verbs",                                  "ray"),
    "features.submit": ("job config compat records strategies display driver.process driver.code "
                       "driver.reporting driver.preflight verbs",                              "ray"),
    "features.tokenize": ("config records display verbs",                                      "(pyarrow)"),
    "jobs":         ("job",                                                                    "torch (pyarrow)"),
}  # fmt: skip

for _name in [name for name in RULES if name.startswith("features.")]:
    if not (ROOT / "orchestrator" / _name.replace(".", "/")).is_dir():  # the folder of a feature may be deleted
        del RULES[_name]

# Of a package that knows a library, the modules that do.
KNOWS = {
    ("config", "hydra"): {"config.overrides", "config.compose"},
    ("config", "omegaconf"): {"config.compose", "config.recorded_config"},
    ("features.tracking", "mlflow"): {
        "features.tracking.mlflow",
        "features.tracking.mlflow_sweep",
        "features.tracking.mlflow_model",
    },
    ("features.tracking", "torch"): {"features.tracking.sinks"},
    ("features.export", "mlflow"): {"features.export.loader"},
    ("worker", "ray"): {"worker.base_actor", "worker.actor"},
    ("compat", "ray"): {
        "compat.ray.counted_sources",
        "compat.ray.datasets",
        "compat.ray.gcs",
        "compat.ray.internals",
        "compat.ray.side_effects",
    },
    ("compat", "hydra"): {"compat.hydra"},
    ("compat", "omegaconf"): {"compat.hydra"},
    ("storage", "pyarrow"): {"storage.remote"},
    ("features.tokenize", "pyarrow"): {"features.tokenize.pieces"},
    ("jobs", "pyarrow"): {"jobs.rows"},
}


@dataclass(frozen=True)
class Import:
    """``when``: as the module is imported, inside a function, or for type checking only."""

    source: str
    target: str
    when: Literal["at import", "in a function", "for types"]
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
    def visit(node: ast.AST, when: Literal["at import", "in a function", "for types"]) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, when, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: relative imports are not used here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(name, inner if inner in files() else str(node.module), when, node.lineno)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            when = "in a function" if when == "at import" else when
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            when = "for types"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    return visit(tree, "at import")


@cache
def package_of(module: str) -> str | None:
    """The row of a module of ours; None for ``orchestrator`` itself, the public API, and for other people's modules."""
    top, _, inside = module.partition(".")
    if top == "jobs":
        return "jobs"
    if top != "orchestrator" or not inside:
        return None
    if "." not in inside and inside not in RULES:
        return "verbs"
    rows = (row for row in RULES if f"{inside}.".startswith(f"{row}."))
    return max(rows, key=len, default=inside.partition(".")[0])


def may_import(package: str) -> set[str]:
    return {package, *RULES[package][0].split()}


def test_every_module_has_a_row() -> None:
    for module in files():
        assert module == "orchestrator" or package_of(module) in RULES, f"{module}: give its package a row in RULES"
    for package in RULES:
        assert any(package_of(m) == package for m in files()), f"{package}: no such package; remove its row from RULES"


def test_packages_import_only_packages_above_them() -> None:
    order = list(RULES)
    for package in order:
        below = [p for p in may_import(package) - {package} if order.index(p) > order.index(package)]
        assert not below, f"{package} may import {below}, which stand below it: that would allow a circle"


def test_a_package_imports_only_what_the_rules_allow() -> None:
    broken = [
        f"{i} ({i.when}): {package} may not import {i.target}; of ours it may import {sorted(may_import(package))}"
        for i in imports()
        if (package := package_of(i.source)) and package_of(i.target) not in (None, *may_import(package))
    ]
    assert not broken, "\n".join(broken)


def test_a_package_knows_only_its_own_libraries() -> None:
    broken = [
        f"{i} ({i.when}): {package} may not import {library}; it may import: {allowed or 'none'}"
        for i in imports()
        if (package := package_of(i.source))
        and (library := i.target.split(".")[0]) in LIBRARIES
        and library not in (allowed := RULES[package][1].split())
        and not (i.when != "at import" and f"({library})" in allowed)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("package", "library"), [known for known in KNOWS if known[0] in RULES])
def test_a_library_is_known_to_few_modules(package: str, library: str) -> None:
    knowing = {i.source for i in imports() if package_of(i.source) == package and i.target.split(".")[0] == library}
    assert {name.removeprefix("orchestrator.") for name in knowing} == KNOWS[package, library]


def test_every_permission_is_used() -> None:
    """So that the table says what is, not what once was."""
    unused = []
    for package, (ours, libraries) in RULES.items():
        targets = [i.target for i in imports() if package_of(i.source) == package]
        used = {package_of(t) for t in targets} | {t.split(".")[0] for t in targets}
        unused += [f"{package}: {word}" for word in f"{ours} {libraries}".split() if word.strip("()") not in used]
    assert not unused, f"remove from RULES: {unused}"


FEATURES = "orchestrator.features."
STRATEGIES = r"orchestrator\.features\.\w+\.strategies"
"""The modules that the registry of strategies imports."""
# The modules of the core that name a feature, in a text, to import it if a run asks for it.
DOORS = {"strategies.data.datasets": {"feeding"}}


def test_the_core_imports_no_feature_by_name() -> None:
    core = [package for package in RULES if not package.startswith("features.")]
    named = [f"{p}: {word}" for p in core for word in may_import(p) if word.startswith("features.")]
    assert not named, f"a feature hangs on the core, which it alone imports: {named}"


def test_the_core_names_a_feature_only_at_its_door() -> None:
    named: dict[str, set[str]] = {}
    for module, text in ((m, path.read_text()) for m, path in files().items() if not m.startswith(FEATURES)):
        nodes = ast.walk(ast.parse(text)) if FEATURES in text else ()
        texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
        if found := {t.split(".")[2] for t in texts if isinstance(t, str) and t.startswith(FEATURES)}:
            named[module.removeprefix("orchestrator.")] = found
    assert named == DOORS


def at_import(*, later: bool = False) -> dict[str, set[str]]:
    """What each module imports as it is imported itself, and in its functions if ``later``."""
    graph: dict[str, set[str]] = {m: set() for m in files()}
    for i in imports():
        if i.when == "at import" or (later and i.when == "in a function"):
            graph[i.source].add(i.target)
    return graph


@pytest.mark.parametrize("package", ["", "orchestrator.config."], ids=["at import", "of the configuration"])
def test_no_circles(package: str) -> None:
    graph = {m: found for m, found in at_import(later=bool(package)).items() if m.startswith(package)}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in graph and module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def brought_by(*modules: str) -> set[str]:
    """What ``import module`` brings with it, for each of the modules."""
    graph, seen, ahead = at_import(), set(), [*modules]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += [*graph.get(name, ()), *([name.rpartition(".")[0]] if "." in name else [])]
    return seen


def loads(module: str) -> set[str]:
    """The libraries that ``import module`` brings with it."""
    return {name.split(".")[0] for name in brought_by(module)} & LIBRARIES


def test_no_rank_imports_the_checks_of_the_driver() -> None:
    """Ranks import the worker, and the strategies by their names."""
    checks = "orchestrator.strategies.checks"
    of_driver = (
        "orchestrator.driver",
        *(f"orchestrator.features.{name}" for name in ("auto", "doctor", "plan")),
        checks,
    )
    ranks = brought_by(*(module for module in files() if not module.startswith(of_driver)))
    assert {name for name in ranks if name.startswith(checks)} == set()


# The rooms of `strategies`, in order: each may import itself and those above it. A module is in the room with the
# longest of the names that it begins with.
ROOMS = {
    "measures": "measure data update",
    "base": "keys rank_context constructor reduction groups base kept_state training_step peer_copies registry "
            "transforms.blocks",
    "transforms": "transforms",
    "trained": "owner trained whole_model",
    "sums": "sums replicated.comm_hooks replicated.ddp_options replicated.sync_batchnorm",
    "parts": "parts",
    "trainer": "undivided findings whole_exchange whole_check compared_trainer trainer slots saving recovery "
               "mesh_trainer",
    "rules": "rules",
    "checks": "checks",
    "presets": "presets replicated external",
}  # fmt: skip


def room_of(module: str) -> str | None:
    inside = module.removeprefix("orchestrator.strategies.")
    names = {n: room for room, named in ROOMS.items() for n in named.split() if f"{inside}.".startswith(f"{n}.")}
    return names[max(names, key=len)] if names and inside != module else None


def test_no_room_of_the_strategies_imports_a_later_one() -> None:
    order, inside = [*ROOMS], "orchestrator.strategies."
    assert [m for m in files() if m.startswith(inside) and room_of(m) is None] == []
    upwards = [
        f"{i} ({i.when}): {source} may not import {i.target}, of {target}"
        for i in imports()
        if i.source.startswith(inside) and i.target.startswith(inside) and i.when == "at import"
        if (source := room_of(i.source)) and (target := room_of(i.target)) and order.index(target) > order.index(source)
    ]
    assert not upwards, "\n".join(upwards)


def test_each_room_of_the_strategies_has_modules() -> None:
    inside = [m.removeprefix("orchestrator.strategies.") for m in files() if m.startswith("orchestrator.strategies.")]
    for names in ROOMS.values():
        assert all(any(f"{m}.".startswith(f"{n}.") for m in inside) for n in names.split())


@pytest.mark.parametrize(
    ("module", "libraries", "why"),
    [
        ("orchestrator", set(), "`import orchestrator` is quick"),
        ("orchestrator.cli", set(), "--help is quick"),
        ("orchestrator.launch", set(), "--help is quick"),
        ("orchestrator.features.doctor.verbs.doctor", set(), "--help is quick"),
        ("orchestrator.config.help", {"hydra", "omegaconf"}, "--help is quick"),
        ("orchestrator.driver.preflight.early_checks", {"hydra", "omegaconf"}, "a wrong key is refused at once"),
        ("orchestrator.driver.preflight.named_runs", {"hydra", "omegaconf"}, "a missing run is refused at once"),
        ("orchestrator.completion", set(), "completion of a run is quick"),
        ("orchestrator.strategies.registry", set(), "a wrong key is refused at once"),
        *((module, set(), "so it is of a feature") for module in files() if re.fullmatch(STRATEGIES, module)),
        ("orchestrator.worker.actor", {"torch", "ray"}, "a worker starts without Hydra and MLflow"),
        ("orchestrator.features.scripts.script_actor", {"ray"}, "the worker of a script starts without torch"),
        ("orchestrator.strategies", {"torch"}, "a strategy is plain torch"),
        ("jobs.digits", {"torch"}, "a job is plain torch"),
        ("jobs.gpt", {"torch"}, "a job is plain torch"),
        ("orchestrator.features.tracking.follower", set(), "the uploading process starts quickly and is small"),
        ("orchestrator.driver.session", {"torch", "ray", "hydra", "omegaconf"}, "MLflow's slow import delays no start"),
    ],
)
def test_what_comes_with_an_import(module: str, libraries: set[str], why: str) -> None:
    assert loads(module) <= libraries, why
