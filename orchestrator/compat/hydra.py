"""The internals of Hydra that this project touches, written against Hydra 1.3.8."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.grammar.functions import FunctionCall, Functions
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.grammar.gen.OverrideLexer import CommonTokenStream, InputStream, OverrideLexer  # type: ignore[attr-defined]
from hydra.grammar.gen.OverrideParser import OverrideParser
from hydra.plugins.config_source import ConfigResult
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

CHECKED_VERSION = "1.3.8"

KeepText = Callable[[str, Any], Any]
"""Returns what stands for a value that is no text: ``(its text, the value)``."""

_SINGLETONS: tuple[type, ...] = (GlobalHydra, JobRuntime, VersionBase)
"""What ``initialize_config_dir`` and the parser of overrides change for the whole process."""
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


def compose_files(directory: Path, words: Sequence[str], keep: KeepText) -> DictConfig:
    """Compose the files in ``directory`` with the groups that ``words`` choose, as Hydra does, but ``keep`` texts.

    Raises:
        HydraException, OmegaConfBaseException: they cannot be composed.
    """

    class Source(FileConfigSource):
        def load_config(self, config_path: str) -> ConfigResult:
            path = Path(self.path, self._normalize_file_name(config_path))
            if not path.is_file():
                return super().load_config(config_path)  # which says so
            return ConfigResult(
                config=read_yaml(path, keep),
                path=f"{self.scheme()}://{self.path}",
                provider=self.provider,
                header=self._get_header_dict(path.read_text(encoding="utf-8")),
            )

    Plugins.instance()  # registers the sources
    sources = SourcesRegistry.instance().types
    scheme = FileConfigSource.scheme()
    before = sources[scheme]
    sources[scheme] = Source
    try:
        with own_hydra(), initialize_config_dir(config_dir=os.fspath(directory), version_base="1.3"):
            return compose("config", overrides=list(words))
    finally:
        sources[scheme] = before


def read_yaml(path: Path, keep: KeepText) -> Any:
    """Read a file as ``OmegaConf.load`` does, but ``keep`` the text of numbers and switches."""
    loader = get_yaml_loader()
    for name in _NO_TEXT:
        tag = f"tag:yaml.org,2002:{name}"
        construct = loader.yaml_constructors[tag]
        loader.add_constructor(tag, lambda it, node, construct=construct: keep(node.value, construct(it, node)))
    with path.open(encoding="utf-8") as file:
        return OmegaConf.create(loader(file).get_single_data() or {})
