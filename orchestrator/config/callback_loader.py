"""Imports the classes named by ``callbacks``, and calls them with their arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from orchestrator.config.build import build
from orchestrator.config.job_loader import imported_class
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import JobSpec
from orchestrator.config.text import did_you_mean
from orchestrator.user_code.callbacks import METHODS, Callback
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.exits import error_text, exits_refused


def load_callbacks(specs: Sequence[JobSpec], errors: list[str], redactor: Redactor) -> list[Callback]:
    """Return the callbacks of a run, as far as they can be made.

    Args:
        specs: the class of each, and its arguments.
        errors: receives why one cannot be made, with the secrets of its arguments masked.
        redactor: learns these secrets.
    """
    own: list[str] = []
    made = [_made(spec, f"callbacks[{i}]", own, redactor) for i, spec in enumerate(specs)]
    errors += [redactor.text(error) for error in own]
    return [callback for callback in made if callback is not None]


def _made(spec: JobSpec, key: str, errors: list[str], redactor: Redactor) -> Callback | None:
    redactor.learn(spec.fields)
    typed = f"{key}={spec.target}"
    cls = imported_class(spec.target, typed, Callback, errors)
    if cls is None:
        return None
    if not issubclass(cls, Callback):
        errors.append(f"{typed}: not a subclass of orchestrator.Callback; derive the class from it")
        return None
    unknown = [name for name in dir(cls) if name.startswith("on_") and name not in METHODS]
    if unknown:
        errors += [f"{typed}: no run calls {name}(); {did_you_mean(name, METHODS)}" for name in unknown]
        return None
    try:
        with exits_refused():
            arguments = _arguments(cls, spec, key, errors)
            return None if arguments is None else cls(**arguments)
    except JobError as e:
        errors.append(f"{typed}: {e}")
    except Exception as e:
        errors.append(f"{typed}: its __init__ raised {error_text(e)}")
    return None


def _arguments(cls: type[Callback], spec: JobSpec, key: str, errors: list[str]) -> dict[str, Any] | None:
    """Return the arguments of the class, which are checked as the fields of a job are; None if some are wrong."""
    signature = inspect.signature(cls, eval_str=True)
    parameters = {p.name: p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    fields = [
        (name, Any if p.annotation is p.empty else p.annotation, dataclasses.field())
        for name, p in parameters.items()
        if p.default is p.empty or name in spec.fields
    ]
    unknown = [name for name in spec.fields if name not in parameters]
    errors += [f"{key}.{name}: unknown key; {did_you_mean(name, parameters, prefix=f'{key}.')}" for name in unknown]
    known = {name: value for name, value in spec.fields.items() if name in parameters}
    built = build(dataclasses.make_dataclass(cls.__name__, fields, kw_only=True), known, key, errors)
    return None if built is None or unknown else vars(built)
