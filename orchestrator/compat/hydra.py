"""The internals of Hydra that this project touches, written against Hydra 1.3.8."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.grammar.functions import FunctionCall, Functions
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import CommonTokenStream, InputStream, OverrideLexer  # type: ignore[attr-defined]
from hydra.grammar.gen.OverrideParser import OverrideParser
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper, get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

CHECKED_VERSION = "1.3.8"

KeepText = Callable[[str, Any], Any]
"""Returns what stands for a value that is no text: ``(its text, the value)``."""

_SINGLETONS: tuple[type, ...] = (GlobalHydra, JobRuntime, VersionBase)
"""What composing and the parser of overrides change for the whole process."""
_KEEPS_TEXT = ("choice", "shuffle", "sort", "tag", "str")
"""The functions in overrides whose arguments keep their text; the others compute with numbers."""
_NO_TEXT = ("int", "float", "bool")
"""The types of YAML that stand for something other than their text."""


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Use Hydra in this context, or function, without a trace in a program that uses Hydra itself."""
    instances = Singleton._instances
    callers = {cls: instances.pop(cls) for cls in _SINGLETONS if cls in instances}
    try:
        yield
    finally:
        for cls in _SINGLETONS:
            instances.pop(cls, None)
        instances.update(callers)


def parse_override(text: str, keep: KeepText, plain: Callable[[Any], Any]) -> Override:
    """Parse an override as Hydra does, but ``keep`` the text of numbers, switches and nulls; ``plain`` undoes that.

    Raises:
        HydraException: it cannot be parsed.
    """
    lexer = OverrideLexer(InputStream(text))
    parser = OverrideParser(CommonTokenStream(lexer))
    for recognizer in (lexer, parser):
        recognizer.removeErrorListeners()
        recognizer.addErrorListener(HydraErrorListener())
    tree = parser.override()  # type: ignore[no-untyped-call]
    override: Override = _Visitor(create_functions(), keep, plain).visit(tree)
    override.input_line = text
    override.validate()
    return override


class _Visitor(HydraOverrideVisitor):
    def __init__(self, functions: Functions, keep: KeepText, plain: Callable[[Any], Any]):
        super().__init__(_Functions(functions.definitions, functions.functions, plain))
        self._keep = keep

    def _createPrimitive(self, ctx: Any) -> Any:
        value = super()._createPrimitive(ctx)
        return value if isinstance(value, (str, QuotedString)) else self._keep(ctx.getText().strip(" \t"), value)


class _Functions(Functions):
    def __init__(self, definitions: Any, functions: Any, plain: Callable[[Any], Any]):
        super().__init__(definitions, functions)
        self._plain = plain

    def eval(self, func: FunctionCall) -> Any:
        args = func.args if func.name in _KEEPS_TEXT else list(map(self._plain_argument, func.args))
        return super().eval(FunctionCall(func.name, args, self._plain(func.kwargs)))

    def _plain_argument(self, value: Any) -> Any:
        if isinstance(value, ChoiceSweep):
            value.list = self._plain(value.list)
        return self._plain(value)


def element_text(value: Any) -> str:
    """Return a parsed value as an override has it."""
    text: str = Override._get_value_element_as_str(value)
    return text


@own_hydra()
def quote_text(text: str) -> str:
    """Return ``text`` as it has to be typed for Hydra to read the same text back; in quotes only if necessary."""
    if re.fullmatch(r"[\w./:@%+-]+", text, re.ASCII):
        override = parse_override(f"key={text}", lambda _, value: value, lambda value: value)
        if type(override.value()) is str:
            return text
    # A backslash keeps OmegaConf from reading ${...} as an interpolation; those before it have to be doubled.
    literal = re.sub(r"(\\*)\$\{", lambda m: f"{m[1] * 2}\\${{", text)
    return QuotedString(text=literal, quote=Quote.single).with_quotes()


@dataclass(frozen=True)
class Composed:
    """Composed files.

    Attributes:
        config: the result, with Hydra's own keys.
        read: the files that were read, each with its section ``hydra``.
    """

    config: DictConfig
    read: Mapping[Path, Any]


@contextlib.contextmanager
def opened(
    directories: Sequence[Path], keep: KeepText, honoured: Sequence[str], read: dict[Path, Any]
) -> Iterator[Hydra]:
    """Open Hydra on the files in ``directories``, of which it takes the first that has a file, but ``keep`` texts.

    Args:
        directories: at least one.
        keep: see above.
        honoured: the keys of Hydra that a file may set, such as ``hydra.sweeper.params``; others are left out.
        read: receives the files that are read, each with its section ``hydra``.
    """

    class Source(FileConfigSource):
        def load_config(self, config_path: str) -> ConfigResult:
            path = Path(self.path, self._normalize_file_name(config_path))
            if not path.is_file():
                return super().load_config(config_path)  # which says so
            # Hydra checks the types of its own keys, and describes errors in them with its own classes.
            config = read_yaml(path, keep if not config_path.startswith("hydra/") else lambda _, value: value)
            if "defaults" in config:  # names of files are texts
                config.defaults = read_yaml(path, lambda text, _: text).defaults
                if not OmegaConf.is_list(config.defaults):
                    raise HydraException(f"{path}: defaults: expected a list, as in `defaults: [{{strategy: ddp}}]`")
            kept = {key: OmegaConf.select(config, key) for key in honoured}
            section = config.pop("hydra", None)
            read[path] = OmegaConf.to_container(section) if OmegaConf.is_config(section) else section
            for key, value in kept.items():
                if value is not None:
                    OmegaConf.update(config, key, value, force_add=True)
            return ConfigResult(
                config=config,
                path=f"{self.scheme()}://{self.path}",
                provider=self.provider,
                header=self._get_header_dict(path.read_text(encoding="utf-8")),
            )

    first, *others = directories
    Plugins.instance()  # registers the sources
    sources = SourcesRegistry.instance().types
    scheme = FileConfigSource.scheme()
    before = sources[scheme]
    sources[scheme] = Source
    try:
        with own_hydra():
            setbase("1.3")
            path = create_config_search_path(search_path_dir=os.fspath(first))
            for directory in others:
                path.prepend("user", f"{scheme}://{directory}", anchor="schema")  # Hydra wants the schema last
            yield Hydra.create_main_hydra2(task_name="app", config_search_path=path)
    finally:
        sources[scheme] = before


def also_search(directories: Sequence[Path]) -> None:
    """Let every Hydra of this process, such as one that completes words for a shell, search ``directories`` too."""

    class Also(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for directory in directories:
                search_path.append("orchestrator", f"{FileConfigSource.scheme()}://{directory}")

    Plugins.instance().register(Also)


def compose_files(
    directories: Sequence[Path], name: str, words: Sequence[str], keep: KeepText, honoured: Sequence[str]
) -> Composed:
    """Compose the file ``name`` and the groups that ``words`` choose, as Hydra does; other arguments as in `opened`.

    Raises:
        HydraException, OmegaConfBaseException: they cannot be composed.
    """
    read: dict[Path, Any] = {}
    with opened(directories, keep, honoured, read), _described(read):
        return Composed(compose(name, overrides=list(words), return_hydra_config=True), read)


@contextlib.contextmanager
def _described(read: Mapping[Path, Any]) -> Iterator[None]:
    """Raise a HydraException for files that Hydra cannot compose, but does not expect. ``read``: those up to there."""
    try:
        yield
    except RecursionError as e:
        last = ", ".join(map(str, [*read][-2:]))
        raise HydraException(f"{last}: cannot be composed, because a file has itself in its defaults") from e
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError) as e:
        if isinstance(e, (HydraException, OmegaConfBaseException)):
            raise
        last = ", ".join(map(str, [*read][-1:])) or "the files"
        raise HydraException(f"{last}: cannot be composed ({' '.join(str(e).split()) or type(e).__name__})") from e


def show_info(directories: Sequence[Path], name: str, words: Sequence[str], topics: Sequence[str]) -> None:
    """Print what Hydra knows about the files: ``plugins``, ``searchpath``, ``defaults-tree`` or ``defaults``.

    Raises:
        HydraException, OmegaConfBaseException: they cannot be composed.
    """
    root = logging.getLogger()  # by which Hydra prints
    handlers, level = root.handlers[:], root.level
    try:
        read: dict[Path, Any] = {}
        with opened(directories, lambda _, value: value, (), read) as hydra, _described(read):
            for topic in topics:
                hydra.show_info(topic, name, list(words))
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def read_yaml(path: Path, keep: KeepText) -> DictConfig:
    """Read a file as ``OmegaConf.load`` does, but ``keep`` the text of numbers and switches.

    Raises:
        HydraException: it cannot be read, or has no keys.
    """
    loader = get_yaml_loader()
    for name in _NO_TEXT:
        tag = f"tag:yaml.org,2002:{name}"
        construct = loader.yaml_constructors[tag]
        loader.add_constructor(tag, lambda it, node, construct=construct: keep(node.value, construct(it, node)))
    try:
        with path.open(encoding="utf-8") as file:
            data = loader(file).get_single_data()
        config = OmegaConf.create({} if data is None else data if isinstance(data, (dict, list)) else [data])
    except yaml.MarkedYAMLError as e:
        is_open = e.problem == "found unexpected end of stream"  # a quote, say, which begins where the context does
        mark = e.context_mark if is_open and e.context_mark is not None else e.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = f"{e.context}, {e.problem}" if is_open else e.problem
        raise HydraException(f"{path}{line}: not YAML ({problem})") from e
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as e:
        reason = getattr(e, "strerror", None) or " ".join(str(e).split())
        raise HydraException(f"{path}: cannot be read ({reason})") from e
    if not isinstance(config, DictConfig):
        raise HydraException(f"{path}: expected keys with values, as in `steps: 100`")
    return config


def yaml_value(text: str) -> Any:
    """Return the number, switch, null or text that ``text`` is in a file."""
    try:
        return get_yaml_loader()(text).get_single_data()
    except yaml.YAMLError:
        return text


def write_yaml(data: Any, typed: type[str]) -> str:
    """Return nested plain values as YAML; the texts ``typed`` without quotes."""

    class Dumper(get_omega_conf_dumper()):  # type: ignore[misc]
        pass

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar(dumper.resolve(yaml.ScalarNode, str(text), (True, False)), str(text))

    Dumper.add_representer(typed, represent)
    return str(yaml.dump(data, Dumper=Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False))
