"""Imports the class named by ``job._target_`` and builds a checked :class:`~orchestrator.job.Job` from its fields."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.build import build, with_key
from orchestrator.config.job_source import missing_module
from orchestrator.config.redact import MASK, Redactor, holds_secret, stands_for_secret
from orchestrator.config.schema import JobSpec
from orchestrator.config.text import did_you_mean, format_override
from orchestrator.job import Job
from orchestrator.user_code.callbacks import METHODS, Callback
from orchestrator.user_code.errors import JobError, error_text, exits_refused, own_frames, place_of

_NOT_FROZEN = "cannot inherit non-frozen dataclass from a frozen one"
"""What Python says of a job that is a plain ``@dataclass``."""


def load_job(
    spec: JobSpec,
    errors: list[str],
    redactor: Redactor | None = None,
    given: Job | type[Job] | None = None,
    noticed: list[str] | None = None,
) -> Job | None:
    """Import the job's class, build it from its fields and run :meth:`~orchestrator.job.Job.check`.

    Args:
        spec: the class and its fields.
        errors: receives why the job cannot be built, with the secrets of its fields masked.
        redactor: learns these secrets, including those that default factories return.
        given: an object to use in place of the class that ``spec`` names: a class, or an instance.
        noticed: receives the warnings of ``Job.check()`` that name a field, masked; None leaves them to Python.

    Returns:
        The job, or None if it cannot be built.
    """
    redactor = redactor or Redactor()
    redactor.learn(spec.fields)
    job_errors: list[str] = []
    job_warnings: list[str] = []
    job: Job | None = None
    try:
        with exits_refused(), contextlib.nullcontext() if noticed is None else _collected(job_warnings):
            job = _load(spec, given, job_errors, redactor)
    except JobError as e:
        job_errors.append(with_key("job", e))
    errors += [redactor.text(error) for error in job_errors]
    if noticed is not None:
        noticed += [redactor.text(text) for text in job_warnings]
    return job


@contextlib.contextmanager
def _collected(texts: list[str]) -> Iterator[None]:
    """Collect warnings that name a field of the job; those of libraries go where they went before."""
    others = warnings.showwarning

    def collect(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith("job."):
            texts.append(str(message))
        else:
            others(message, *args, **kwargs)

    warnings.showwarning = collect
    try:
        yield
    finally:
        warnings.showwarning = others


def is_importable(cls: type[Job]) -> bool:
    """Return whether another process can import ``cls``, which it cannot if a notebook or a script defines it."""
    module = sys.modules.get(cls.__module__)
    named = getattr(module, cls.__qualname__, None) is cls
    return named and cls.__module__ != "__main__" and getattr(module, "__spec__", None) is not None


def _load(spec: JobSpec, given: Job | type[Job] | None, errors: list[str], redactor: Redactor) -> Job | None:
    if isinstance(given, Job):
        job: Job | None = given
        redactor.learn(given)
        for name, value in spec.fields.items():
            set_field = format_override(f"job.{name}", value)
            errors.append(f"{set_field}: the job is an instance already; set the field there, or pass the class")
    else:
        cls = find_class(spec.target, errors) if given is None else _checked(given, spec.target, errors)
        if cls is None:
            return None
        job = build(cls, spec.fields, "job", errors)
        redactor.learn(_defaults(cls) if job is None else job)
    if job is None or errors:
        return None
    try:
        job.check()
    except (ValueError, OSError) as e:
        errors.append(with_key("job", e))
        return None
    return job


def _defaults(cls: type[Job]) -> dict[str, object]:
    """Return the default values of the fields: the message of a failed ``__post_init__`` may repeat secrets in them."""
    defaults: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            with contextlib.suppress(Exception):  # the factory is the user's, and may be what failed
                defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return defaults


def unmasked(spec: JobSpec, errors: list[str], given: Collection[str] = ()) -> JobSpec:
    """Return the recorded job ``spec`` with what its class has by default in place of the secrets, which it lacks.

    Args:
        spec: a job from a record, in which secrets are masked.
        errors: receives the secrets of which the class has no default.
        given: keys whose recorded values do not matter.
    """
    masked = [name for name, value in spec.fields.items() if _has_mask(value)]
    cls = find_class(spec.target, errors) if masked else None
    if cls is None:
        return spec
    defaults, redactor = _defaults(cls), Redactor.of_process()
    redactor.learn(defaults)
    fields = dict(spec.fields)
    for name in masked:
        default = defaults.get(name, dataclasses.MISSING)
        fields[name] = _with_default(fields[name], default, f"job.{name}", redactor, errors, given)
        if fields[name] is default:
            del fields[name]  # its factory runs again
    return dataclasses.replace(spec, fields=fields)


def _has_mask(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_mask, value.values()))
    return any(map(_has_mask, value)) if isinstance(value, (list, tuple)) else isinstance(value, str) and MASK in value


def _with_default(
    value: Any, default: Any, key: str, redactor: Redactor, errors: list[str], given: Collection[str]
) -> Any:
    """Return a recorded ``value`` with the parts of ``default`` in place of those that are masked in both."""
    if isinstance(value, Mapping):
        parts = default if isinstance(default, Mapping) else getattr(default, "__dict__", {})
        return {
            name: _with_default(v, parts.get(name, dataclasses.MISSING), f"{key}.{name}", redactor, errors, given)
            for name, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = default if isinstance(default, (list, tuple)) and len(default) == len(value) else ()
        return [
            _with_default(v, d, f"{key}[{i}]", redactor, errors, given)
            for i, (v, d) in enumerate(itertools.zip_longest(value, items, fillvalue=dataclasses.MISSING))
        ]
    if not _has_mask(value) or key in given:
        return value
    name = key.rpartition(".")[2]
    if default is not dataclasses.MISSING:
        recorded = MASK if holds_secret(name, default) else redactor.text(str(default))
        if recorded == value:
            return default
    if stands_for_secret(f"={value}"):
        errors.append(
            f"{key}={value}: {MASK} stands for a secret that the run did not store; type {key}=... with `evaluate`, or "
            "let the default of the field read it, as from an environment variable"
        )
    return value


def find_class(target: str, errors: list[str]) -> type[Job] | None:
    """Import the class named by ``job._target_``; returns None if it is no job, and ``errors`` receives why."""
    key = f"job._target_={target}"
    if target.rpartition(".")[0] == "__main__":
        errors.append(f"{key}: no other process can import it; pass the class to orchestrator.run")
        return None
    cls = imported_class(target, key, Job, errors)
    return None if cls is None else _checked(cls, target, errors)


def imported_class(target: str, key: str, base: type, errors: list[str]) -> type[Any] | None:
    """Import the class ``target``; returns None if there is none, and ``errors`` receives why.

    Args:
        target: package.module.Class.
        key: the key that names it, with its value, for the errors.
        base: the class of those that may be meant.
        errors: receives one line.
    """
    if not re.fullmatch(r"\w+(\.\w+)+", target):
        errors.append(f"{key}: expected package.module.Class")
        return None
    module_name, _, class_name = target.rpartition(".")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # `python -m` puts the working directory on the import path; a console script does not.
        sys.path.append(str(Path.cwd()))
    try:
        with exits_refused():
            module = importlib.import_module(module_name)
    except JobError as e:
        errors.append(f"{key}: {e}")
        return None
    except ModuleNotFoundError as e:
        if e.name is None or not (module_name + ".").startswith(e.name + "."):
            errors.append(f"{key}: importing {module_name} failed: {e}")
        else:
            errors.append(missing_module(key, e.name))
        return None
    except Exception as e:
        place = f" ({place_of(frames[-1])})" if (frames := own_frames(e)) else ""
        remedy = "; write @dataclass(frozen=True, kw_only=True), as the class Job is" if _NOT_FROZEN in str(e) else ""
        errors.append(f"{key}: importing {module_name} failed: {error_text(e)}{place}{remedy}")
        return None
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        known = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base) and c is not base]
        hint = did_you_mean(class_name, known) if known else "expected package.module.Class"
        errors.append(f"{key}: {module_name} has no class {class_name}; {hint}")
        return None
    return cls


def _wrong_kinds(cls: type[Job]) -> list[str]:
    """Return which members of a job are methods instead of properties, the reverse, or a text instead of a tuple."""
    wrong: list[str] = []
    for name, member in {**vars(Callback), **vars(Job)}.items():
        own = inspect.getattr_static(cls, name)
        if isinstance(member, property) and inspect.isfunction(own) and name != "collate":  # which is a function itself
            wrong.append(f"{name} has to be a property; decorate it with @property")
        elif inspect.isfunction(member) and isinstance(own, property):
            wrong.append(f"{name}() has to be a method; leave out @property")
        elif isinstance(member, tuple) and isinstance(own, str):
            wrong.append(f"{name} has to be a tuple of names; write {name} = ({own!r},)")
    return wrong


def _checked(cls: type[Any], target: str, errors: list[str]) -> type[Job] | None:
    if not issubclass(cls, Job):
        errors.append(f"job._target_={target}: not a subclass of orchestrator.Job; derive the class from it")
    elif missing := sorted(getattr(cls, "__abstractmethods__", ())):
        errors.append(f"job._target_={target}: the class has to define {', '.join(m + '()' for m in missing)}")
    elif wrong := _wrong_kinds(cls):
        errors += [f"job._target_={target}: {text}" for text in wrong]
    elif "__annotations__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
        errors.append(
            f"job._target_={target}: not a dataclass, so that its fields cannot be configured; "
            "decorate the class with @dataclass(frozen=True, kw_only=True)"
        )
    else:
        return cls
    return None


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
