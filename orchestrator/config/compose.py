"""Composes ``conf/`` and command-line overrides, with Hydra, into one frozen :class:`Config`."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from orchestrator.compat.hydra import Composed, also_search, compose_files, read_yaml, show_info, yaml_value
from orchestrator.config.build import ConfigError, build
from orchestrator.config.files import (
    DIR_OPTION,
    FIXED,
    GROUPS,
    HONOURED,
    NAME_OPTION,
    PRIMARY,
    Files,
    choice_errors,
    choices,
    conf_dir,
    file_errors,
    group_values,
    shipped_dirs,
)
from orchestrator.config.overrides import group_error, parse, select_valid, value_of, values
from orchestrator.config.places import places_of_choice, with_places
from orchestrator.config.redact import MASK, stands_for_secret
from orchestrator.config.schema import Config, JobSpec, StrategyConfig
from orchestrator.config.synonyms import SIZES
from orchestrator.config.text import did_you_mean, first_few, format_override, path_override, to_cli
from orchestrator.config.typed import Typed, mark, merged, plain, unmark

OmegaConf.register_new_resolver("environment", lambda name, default: os.environ.get(name) or default, replace=True)

StrategyConfigs = Callable[[str], type[Any]]
"""Maps the name of a strategy to a dataclass of its keys; ``make`` makes the options of their values, if it has it."""


def compose(
    words: Sequence[str], errors: list[str], strategy_config: StrategyConfigs
) -> tuple[Config | None, JobSpec | None]:
    """Compose ``conf/`` with the overrides ``words``, such as ``train.steps=10``.

    Every error is appended to ``errors``.

    Returns:
        The configuration, None if there were errors; and the job's part of it, which may be valid even
        if the rest is not, so that the job can be checked in the same pass.
    """
    files = Files.of(words)
    if (error := files.error()) is not None:
        errors.append(error)
        return None, None
    parsed = parse(_with_implied(words, errors, strategy_config), errors)
    data = _compose(select_valid(parsed, files, errors), files, errors, _resolved)
    if data is None:
        return None, None
    # Without a valid name, the keys of that section cannot be checked.
    unknown = {o.key_or_group for o in parsed if not o.is_sweep_override() and group_error(o, files)}
    if files.name != PRIMARY and (missing := Config.__dataclass_fields__.keys() - data):
        errors.append(
            f"{NAME_OPTION}={files.name}: has no {first_few(sorted(missing))}; begin its defaults list with {PRIMARY}, "
            "which has the shipped values"
        )
        return None, None
    _choose_length(data, values(words), errors)
    for key in _masked_keys(data):
        errors.append(f"{key}={MASK}: stands for a secret that a file does not have; give the secret")
    for group in [key for key in data if key not in Config.__dataclass_fields__ and files.is_group(key)]:
        del data[group]
        errors.append(f"{group}: no such section; begin its files with a line that names one, as in `# @package job`")
    return _config(data, unknown, errors, strategy_config)


def placed(words: Sequence[str], errors: Sequence[str]) -> list[str]:
    """Return the ``errors`` of a configuration, with the file and the line of keys that a file of the user sets."""
    own = Files.of(words).own
    return with_places(errors, own_files(words), own, values(words)) if errors and own is not None else list(errors)


def _choose_length(data: dict[str, Any], given: Mapping[str, Any], errors: list[str]) -> None:
    """Let ``train.steps`` on the command line win over ``train.epochs`` in a file; refuse both on the command line."""
    if given.get("train.steps") is None or not isinstance(train := data.get("train"), dict):
        return
    if given.get("train.epochs") is not None:
        errors.append(
            f"train.epochs={given['train.epochs']}: train.steps={given['train.steps']} says how long the run is; leave "
            "one of them out"
        )
    train["epochs"] = None


def _masked_keys(data: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _masked_keys(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(data, str) and stands_for_secret(f"{prefix}={data}"):
        yield prefix


def composed_data(words: Sequence[str], kind: str = "job", *, resolved: bool = False) -> dict[str, Any]:
    """Compose as :func:`compose`, without the checks, into plain values and typed text.

    Args:
        words: options that choose files, and overrides.
        kind: ``job`` for our keys, ``hydra`` for those of Hydra, ``all`` for both.
        resolved: replace interpolations by their values.

    Raises:
        ConfigError: the words cannot be composed.
    """

    def read(composed: DictConfig) -> dict[str, Any]:
        kept = [str(key) for key in composed if kind == "all" or (key == "hydra") == (kind == "hydra")]
        chosen = OmegaConf.masked_copy(composed, kept)
        data = _resolve(chosen) if resolved else unmark(OmegaConf.to_container(chosen, enum_to_str=True))
        for name in ("help", "hydra_help"):  # pages of text
            data.get("hydra", {}).pop(name, None)
        return {str(key): value for key, value in data.items()}

    files, errors = Files.of(words), list[str]()
    if (error := files.error()) is not None:
        raise ConfigError([error])
    data = _compose(select_valid(parse(words, errors), files, errors), files, errors, read)
    if errors or data is None:
        raise ConfigError(errors)
    return {**data}


def print_info(words: Sequence[str], topics: Sequence[str]) -> None:
    """Print what Hydra knows about the files of a command; see :func:`orchestrator.compat.hydra.show_info`.

    Raises:
        ConfigError: the words cannot be composed.
    """
    composed_data(words)
    files = Files.of(words)
    show_info(files.directories, files.name, _group_words(parse(words, []), files), topics)


def _with_implied(words: Sequence[str], errors: list[str], strategy_config: StrategyConfigs) -> list[str]:
    """Return ``words`` with the keys that the strategy among them implies; an error for each that it does not read."""
    given = values(words)
    if (name := given.get("strategy")) not in choices("strategy"):
        return list(words)
    keys = strategy_config(name)
    if not issubclass(keys, StrategyConfig):  # of a mesh
        return list(words)
    errors += (
        f"{key}={to_cli(value)}: {keys.why_unread}" for key, value in given.items() if key.startswith(keys.unread)
    )
    if "job._target_" in given:
        given["job"] = given["job._target_"]
    if keys.named_after and "name" not in given and isinstance(file := given.get(keys.named_after), str):
        words = [*words, path_override("name", Path(file).stem)]
    return [*words, *(f"{key}={value}" for key, value in keys.implied.items() if key not in given)]


def shell_completion(words: Sequence[str]) -> None:
    """Handle Hydra's ``--shell-completion`` option in ``sys.argv``; ``words`` choose the files."""
    import hydra

    files = Files.of(words)
    if files.own is not None and files.own.is_dir():
        sys.argv += [DIR_OPTION, str(files.own)]
    if files.name != PRIMARY:
        sys.argv += [NAME_OPTION, files.name]
    GlobalHydra.instance().clear()
    also_search(shipped_dirs()[1:])
    hydra.main(config_path=str(conf_dir()), config_name=PRIMARY, version_base="1.3")(lambda _: None)()


def _compose(
    overrides: Sequence[Override], files: Files, errors: list[str], read: Callable[[DictConfig], Any]
) -> Any | None:
    """Return what ``read`` gets from the composed files and keys; None if they cannot be composed."""
    try:
        composed = _composed_files(overrides, files, errors)
        for override in overrides:
            if not files.is_group(override.key_or_group) or isinstance(override.value(), dict):
                # Also keys that no file has: the fields of a job are in none, and the schema has better messages.
                key = _usual_key(override.key_or_group, composed)
                OmegaConf.update(composed, key, mark(value_of(override)), merge=True, force_add=True)
        return read(composed)
    except (HydraException, OmegaConfBaseException) as e:
        errors.append(_explain(e, files))
        rest = [o for o in overrides if o.key_or_group != getattr(e, "full_key", None)]
        return _compose(rest, files, errors, read) if len(rest) < len(overrides) else None


def _composed_files(overrides: Sequence[Override], files: Files, errors: list[str]) -> DictConfig:
    words = _group_words(overrides, files)
    composed = _load(files, words)
    chosen = OmegaConf.select(composed.config, "hydra.runtime.choices.strategy")
    name = OmegaConf.select(composed.config, "strategy.name")
    if name != chosen and all(choice in choices("strategy") for choice in (name, chosen)):
        # A file that names another strategy, as the output of --cfg does, means the defaults of that one.
        if any(override.key_or_group == "strategy" for override in overrides):
            errors.append(f"strategy={chosen}: a chosen file sets strategy.name={name}; leave one of them out")
        composed = _load(files, [*words, f"strategy={name}"])
    errors += choice_errors(OmegaConf.select(composed.config, "hydra.runtime.choices"))
    if isinstance(strategy := composed.config.get("strategy"), DictConfig):
        with open_dict(strategy):
            strategy.pop(FIXED, None)
            written: Any = OmegaConf.to_container(strategy)
            for key in sorted(SIZES.values() & strategy.keys()):
                if (usual := _usual_key(f"strategy.{key}", composed.config)) != f"strategy.{key}":
                    OmegaConf.update(composed.config, usual, written[key])
                    del strategy[key]
    for path, section in composed.read.items():
        if files.is_own(path):
            errors += (f"{path}: {error}" for error in file_errors(section))
    for path, name in files.shadowed(composed.read):
        if files.notes() and path.parent == files.own:
            continue
        errors.append(
            f"{path}: hidden by the shipped file of this name; rename it, and to change single values of that one, "
            f"begin it with `defaults: [{name}, _self_]`"
        )
    return composed.config


def _usual_key(key: str, composed: DictConfig) -> str:
    """Return ``key``; for a size that the preset has another name for, that name."""
    name = OmegaConf.select(composed, "strategy.name")
    of_preset = group_values("strategy", name) if name in choices("strategy") else {}
    usual = {f"strategy.{size}": f"strategy.{other}" for other, size in SIZES.items() if other in of_preset}
    return usual.get(key, key)


def _load(files: Files, words: Sequence[str]) -> Composed:
    if files.own is not None:  # its files may change
        return compose_files(files.directories, files.name, words, _marked, HONOURED)
    composed: Composed = pickle.loads(_shipped(files, tuple(words)))
    return composed


@functools.cache
def _shipped(files: Files, words: tuple[str, ...]) -> bytes:
    """Compose files that ship, which takes 0.1 s, and pickle the result: a deep copy of it takes six times as long."""
    return pickle.dumps(compose_files(files.directories, files.name, words, _marked, HONOURED))


def own_files(words: Sequence[str]) -> list[Path]:
    """Return the files of the user that ``words`` choose, without keys, as far as they are valid."""
    files = Files.of(words)
    if files.own is None or files.error() is not None:
        return []
    chosen = [o for o in parse(words, []) if not o.is_sweep_override() and not group_error(o, files)]
    try:
        return [path for path in _load(files, _group_words(chosen, files)).read if files.is_own(path)]
    except (HydraException, OmegaConfBaseException):
        return []


def _group_words(overrides: Iterable[Override], files: Files) -> list[str]:
    """Return the overrides that choose files, as Hydra takes them."""
    words = []
    for override in overrides:
        # Hydra rejects experiment=null, although it is the default.
        value = plain(override.value())
        if files.is_group(override.key_or_group) and value is not None and not isinstance(value, dict):
            is_listed = files.name == PRIMARY and override.key_or_group in GROUPS
            word = str(override.input_line)
            words.append(word.lstrip("+") if is_listed else word)
    return words


def _resolved(composed: DictConfig) -> dict[str, Any]:
    with open_dict(composed):
        composed.pop("hydra", None)
    return {str(key): value for key, value in _resolve(composed, throw_on_missing=True).items()}


def _resolve(composed: DictConfig, *, throw_on_missing: bool = False) -> Any:
    """Return plain values in place of interpolations, with the text of those that are numbers.

    Raises:
        OmegaConfBaseException: an interpolation cannot be resolved, or a value is missing.
    """
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=throw_on_missing, enum_to_str=True)
    return merged(OmegaConf.to_container(composed), unmark(values), _interpolated)


def _interpolated(written: Any, value: Any) -> Any:
    """Return ``value`` as typed if an interpolation was ``written``: the texts of environment variables are numbers."""
    if not (isinstance(written, str) and "${" in written and type(value) is str):
        return value
    number = yaml_value(value)
    return Typed(value, number) if isinstance(number, (int, float)) else value


def _marked(text: str, value: Any) -> Any:
    return mark(Typed(text, value))


def _explain(error: HydraException | OmegaConfBaseException, files: Files) -> str:
    """Return the error in one line, which begins with the key if the error has one."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and files.own is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if place := places_of_choice(files.own, group, name):
            return f"{place}: {group}={name}: unknown; {did_you_mean(name, files.choices(group))}"
    text = str(getattr(error, "msg", None) or error).partition("Config search path:")[0]
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
    spec = None if "job" in unknown else job_spec(data.get("job"), errors)
    data["job"] = spec or JobSpec(target="", fields={})
    data["callbacks"] = _callback_specs(data.get("callbacks"), errors)
    strategy = data.get("strategy")
    if isinstance(strategy, Mapping):
        name = str(strategy.get("name"))
        cls = strategy_config(name) if name in choices("strategy") else StrategyConfig
        data["strategy"] = object.__new__(StrategyConfig)  # so that the other sections are checked too
        if "strategy" not in unknown:
            keys, make = _own_keys(cls, strategy, errors), getattr(cls, "make", cls)
            data["strategy"] = build(cls, keys, "strategy", errors, make) or data["strategy"]
    config = build(Config, data, "", errors)
    return (None if errors else config), spec


def job_spec(job: Any, errors: list[str]) -> JobSpec | None:
    """Return the job in the section ``job`` of files; None, with a line in ``errors``, if it names no class."""
    return _spec(job, "job._target_", "; or choose a job with job=<name>", errors)


def _callback_specs(callbacks: Any, errors: list[str]) -> tuple[JobSpec, ...]:
    """Return the class of each callback, given by its path alone or as a mapping with its arguments."""
    if not isinstance(callbacks, list):
        errors.append(f"{format_override('callbacks', callbacks)}: expected a list, as in callbacks=[my_package.Beep]")
        return ()
    entries = [{"_target_": entry} if isinstance(entry, str) else entry for entry in callbacks]
    found = [_spec(entry, f"callbacks[{i}]._target_", "", errors) for i, entry in enumerate(entries)]
    return tuple(spec for spec in found if spec is not None)


def _spec(data: Any, key: str, remedy: str, errors: list[str]) -> JobSpec | None:
    target = plain(data.get("_target_")) if isinstance(data, Mapping) else None
    if not isinstance(target, str):
        errors.append(f"{format_override(key, target)}: expected package.module.Class{remedy}")
        return None
    return JobSpec(target=target, fields={str(k): v for k, v in data.items() if k != "_target_"})


def _own_keys(cls: type[StrategyConfig], strategy: Mapping[Any, Any], errors: list[str]) -> dict[str, Any]:
    """Return the keys but for the ones of other strategies; append an error for each of these, naming its strategy."""
    keys_by_strategy = {name: group_values("strategy", name) for name in choices("strategy")}
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


def recorded_data(path: Path) -> dict[str, Any]:
    """Return the recorded configuration ``path`` as nested plain values.

    Raises:
        ValueError: it cannot be read, or has no keys.
    """
    try:
        recorded = OmegaConf.to_container(read_yaml(path, lambda _, value: value))
    except HydraException as e:
        raise ValueError(str(e)) from e
    if not isinstance(recorded, dict):
        raise ValueError(f"{path}: not the configuration of a run")
    return {str(key): value for key, value in recorded.items()}


def preset_sweep(words: Sequence[str]) -> dict[str, str]:
    """Return the sweep that the chosen files define, as overrides of its keys; empty if they define none.

    They have it where Hydra looks for it, in ``hydra.sweeper.params``, and how to search in the section ``sweep``.
    """
    errors: list[str] = []
    files = Files.of(words)
    if files.error() is not None or not files.may_set_any(values(words)):
        return {}
    single = [o for o in select_valid(parse(words, []), files, []) if files.is_group(o.key_or_group)]
    composed = _compose(single, files, errors, lambda config: config)
    if composed is None:
        return {}  # the check of the runs says why
    params = unmark(OmegaConf.to_container(OmegaConf.select(composed, "hydra.sweeper")))["params"] or {}
    preset = {str(key): to_cli(value) for key, value in params.items()}
    section = unmark(OmegaConf.to_container(OmegaConf.select(composed, "sweep") or OmegaConf.create()))
    for key, default in (("trials", None), ("unfit", "refuse")):
        if (value := plain(section.get(key, default))) != default:
            preset.setdefault(f"sweep.{key}", str(value))
    return preset
