"""Composes ``conf/`` and command-line overrides, with Hydra, into one frozen :class:`Config`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from orchestrator.compat.hydra import compose_files, read_yaml
from orchestrator.config.build import build
from orchestrator.config.overrides import GROUPS, choices, conf_dir, group_error, parse, select_valid, value_of, values
from orchestrator.config.schema import Config, JobSpec, StrategyConfig
from orchestrator.config.text import format_override, path_override
from orchestrator.config.typed import Typed, mark, plain, unmark

OmegaConf.register_new_resolver("environment", lambda name, default: os.environ.get(name) or default, replace=True)

StrategyConfigs = Callable[[str], type[StrategyConfig]]
"""Maps the name of a strategy to its configuration class."""


def compose(
    words: Sequence[str], errors: list[str], strategy_config: StrategyConfigs
) -> tuple[Config | None, JobSpec | None]:
    """Compose ``conf/`` with the overrides ``words``, such as ``train.steps=10``.

    Every error is appended to ``errors``.

    Returns:
        The configuration, None if there were errors; and the job's part of it, which may be valid even
        if the rest is not, so that the job can be checked in the same pass.
    """
    parsed = parse(_with_script_defaults(words), errors)
    data = _compose(select_valid(parsed, errors), errors)
    if data is None:
        return None, None
    # Without a valid name, the keys of that section cannot be checked.
    unknown = {o.key_or_group for o in parsed if not o.is_sweep_override() and group_error(o)}
    return _config(data, unknown, errors, strategy_config)


SCRIPT_DEFAULTS = {"job": "script", "recovery.max_failures": "0"}
"""What ``strategy=script`` sets, unless it is given: the job that holds the script, and that it is not restarted."""


def _with_script_defaults(words: Sequence[str]) -> list[str]:
    given = values(words)
    if given.get("strategy") != "script":
        return list(words)
    if "job._target_" in given:
        given["job"] = given["job._target_"]
    if "name" not in given and isinstance(script := given.get("job.script"), str):
        words = [*words, path_override("name", Path(script).stem)]
    return [*words, *(f"{key}={value}" for key, value in SCRIPT_DEFAULTS.items() if key not in given)]


def shell_completion() -> None:
    """Handle Hydra's ``--shell-completion`` option in ``sys.argv``."""
    import hydra

    GlobalHydra.instance().clear()
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(lambda _: None)()


def _compose(overrides: Sequence[Override], errors: list[str]) -> dict[str, Any] | None:
    # Hydra rejects experiment=null, although it is the default.
    groups = [o for o in overrides if o.key_or_group in GROUPS and plain(o.value()) is not None]
    try:
        composed = compose_files(conf_dir(), [str(o.input_line).lstrip("+") for o in groups], _marked)
        for override in overrides:
            if override.key_or_group not in GROUPS:
                # Also keys that no file has: the fields of a job are in none, and the schema has better messages.
                OmegaConf.update(composed, override.key_or_group, mark(value_of(override)), merge=True, force_add=True)
        data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as e:
        errors.append(_explain(e))
        rest = [o for o in overrides if o.key_or_group != getattr(e, "full_key", None)]
        return _compose(rest, errors) if len(rest) < len(overrides) else None
    assert isinstance(data, dict)
    return {str(k): unmark(v) for k, v in data.items()}


def _marked(text: str, value: Any) -> Any:
    return mark(Typed(text, value))


def _explain(error: HydraException | OmegaConfBaseException) -> str:
    """Return the error in one line, which begins with the key if the error has one."""
    text = str(getattr(error, "msg", None) or error)
    lines = text.splitlines()
    key = getattr(error, "full_key", None)
    if not key:
        return " ".join(lines)
    if isinstance(error, MissingMandatoryValue):
        return f"{key}=???: missing; give it a value"
    reason = lines[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
    return f"{key}: {reason}"


def _config(
    data: dict[str, Any], unknown: set[str], errors: list[str], strategy_config: StrategyConfigs
) -> tuple[Config | None, JobSpec | None]:
    spec = None if "job" in unknown else _job_spec(data.get("job"), errors)
    data["job"] = spec or JobSpec(target="", fields={})
    strategy = data.get("strategy")
    if isinstance(strategy, Mapping):
        name = str(strategy.get("name"))
        cls = strategy_config(name) if name in choices("strategy") else StrategyConfig
        built = None if "strategy" in unknown else build(cls, _own_keys(cls, strategy, errors), "strategy", errors)
        data["strategy"] = built or _placeholder(cls)
    config = build(Config, data, "", errors)
    return (None if errors else config), spec


def _job_spec(job: Any, errors: list[str]) -> JobSpec | None:
    target = plain(job.get("_target_")) if isinstance(job, Mapping) else None
    if not isinstance(target, str):
        errors.append(
            f"{format_override('job._target_', target)}: expected package.module.Class; or choose a job with job=<name>"
        )
        return None
    return JobSpec(target=target, fields={str(k): v for k, v in job.items() if k != "_target_"})


def _own_keys(cls: type[StrategyConfig], strategy: Mapping[Any, Any], errors: list[str]) -> dict[str, Any]:
    """Return the keys but for the ones of other strategies; append an error for each of these, naming its strategy."""
    keys_by_strategy = {name: group_keys("strategy", name) for name in choices("strategy")}
    own: dict[str, Any] = {}
    for key, value in strategy.items():
        owners = [name for name, keys in keys_by_strategy.items() if key in keys]
        if owners and key not in {f.name for f in dataclasses.fields(cls)}:
            errors.append(
                f"strategy.{key}: no such key in strategy={strategy['name']}; it belongs to strategy={owners[0]}"
            )
        else:
            own[str(key)] = value
    return own


def group_keys(group: str, name: str) -> set[str]:
    """Return the keys that ``conf/<group>/<name>.yaml`` sets."""
    return {str(key) for key in OmegaConf.load(conf_dir() / group / f"{name}.yaml")}


def preset_sweep(words: Sequence[str]) -> dict[str, str]:
    """Return the sweep that the chosen ``experiment`` defines, as overrides of its keys; empty if it defines none.

    A file in ``conf/experiment/`` has it where Hydra looks for it, in ``hydra.sweeper.params``.
    """
    for override in parse(words, []):
        if override.key_or_group == "experiment" and override.value() in choices("experiment"):
            params = OmegaConf.select(
                read_yaml(conf_dir() / "experiment" / f"{override.value()}.yaml", _marked), "hydra.sweeper.params"
            )
            return {str(key): str(unmark(value)) for key, value in (params or {}).items()}
    return {}


def _placeholder(cls: type[StrategyConfig]) -> StrategyConfig:
    """Return an empty instance in place of an invalid strategy, so that the other sections are checked too."""
    return object.__new__(cls)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain values, with the job's class under ``_target_`` as in the files."""
    data = plain(dataclasses.asdict(config, dict_factory=_with_lists))
    job = data.pop("job")
    return {**data, "job": {"_target_": job["target"], **job["fields"]}}


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def recorded_job(path: Path) -> JobSpec:
    """Return the job of the recorded configuration ``path``.

    Raises:
        ValueError: it names no class.
    """
    errors: list[str] = []
    spec = _job_spec(recorded_data(path).get("job"), errors)
    if spec is None:
        raise ValueError(errors[0])
    return spec


def recorded_data(path: Path) -> dict[str, Any]:
    """Return the recorded configuration ``path`` as nested plain values.

    Raises:
        ValueError: it has no keys.
    """
    recorded = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(recorded, dict):
        raise ValueError(f"{path}: not the configuration of a run")
    return {str(key): value for key, value in recorded.items()}


def to_yaml(data: Mapping[str, Any]) -> str:
    """Return nested plain values as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(data)))
