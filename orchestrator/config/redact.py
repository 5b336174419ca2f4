"""Masks secrets in everything that a run writes: files, the console, messages, and what MLflow receives.

A secret is found in three ways: by the name of its key; as a value that such a key is known to have, in any of the
forms in which text may contain it; and by its place in an address, as in ``http://user:password@host``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TextIO, cast
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from orchestrator.config.secret_names import is_certain, is_secret, may_name_secret
from orchestrator.config.typed import Typed

MASK = "***"

MIN_LENGTH = 4
"""Shorter secrets are masked only beside their key: they would mask parts of ordinary words."""
_MIN_DIGITS = 6
_MIN_LENGTH_ALONE = 8
"""A shorter secret is masked only where it is a word of its own."""
_MIN_LENGTH_IN_ENVIRONMENT = 8
_CHARACTERS_AT_A_TIME = 1 << 20
_ORDINARY = frozenset(
    [
        *("none", "null", "auto", "true", "false", "default", "basic", "test"),
        *("token", "password", "secret", "user", "admin"),
    ]
)
_NOT_SECRET = frozenset(["", "None", "null", "none", "True", "true", "False", "false", MASK])
_WORKING_DIRECTORIES = frozenset(["PWD", "OLDPWD"])

_USER_AND_PASSWORD = re.compile(r"((?<![\w+.-])\w[\w+.-]*+://)[^/?#\s:@]*:[^/?#\s]*@")
_TOKEN_AS_USER = re.compile(r"(\bhttps?://)[^/?#\s:@*]+@", re.IGNORECASE)
_SIGNATURES = frozenset(["sig", "signature"])
_AUTHORIZATION = re.compile(r"(\b(?:Bearer|Basic)\s+)((?=\S*[\d=])[\w.~+/=-]{8,})")
_PRIVATE_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PRIVATE_KEY_ENDS = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_IN_PLACE_OF_SECRET = re.compile(
    r"""(?:://|[=:])['"]?\*\*\*(?:[@&,}'"]|$) | --[A-Za-z][\w-]*['"]?[\ ,]+['"]?\*\*\*(?![\w*])""", re.VERBOSE
)
_ASSIGNMENT = re.compile(
    r"""(?P<flow> (?<=[{,]) )?
        (?: (?<![\w.\\-]) [\d-]*+ | (?<=\\[nrt]) )
        (?P<key>[A-Za-z_][\w.-]*+)
        (?: \\*+["']? (?: =(?!=)  |  \s?[:=]\s?(?=\\*+["']) )
          | \\*+["'] :\s?
          | (?(flow) :\s? | (?!) ) )""",
    re.VERBOSE,
)
"""``key=value``, ``key = "value"``, ``key: "value"``, ``"key": value`` and ``{key:value``, up to the value. Not
``key: value``: this is how a message begins that names a key. Escapes such as \\n may precede the key."""
_OPTION = re.compile(r"""(?<![\w-])--(?P<name>[A-Za-z][\w-]*+)(?: [ \t]++ | ["']?,[ ]? )""", re.VERBOSE)
"""``--key value``, ``[--key,value]`` and ``['--key', 'value']``, up to the value."""
_OPENING_QUOTE = re.compile(r"""\\*+["']""")
_QUOTES = {quote: re.compile(rf"(?<!\\)(\\*+){quote}") for quote in "'\""}
_BRACKETS = re.compile(r"[\[\]{}()]")
_UNQUOTED = re.compile(r"""[^\s,;&"'\])}]+?(?= [:.]?(?:[\s,;&"'\])}]|$) )""", re.VERBOSE)


def holds_secret(key: str, value: Any) -> bool:
    """Return whether ``value`` must be masked because of its ``key``."""
    value = value.value if isinstance(value, Typed) else value
    return value is not None and value != "" and not isinstance(value, bool) and is_secret(key)


def redact(value: Any) -> Any:
    """Return a copy of nested mappings and lists in which secret keys, and passwords in URLs, are masked."""
    return Redactor().data(value)


def redact_text(text: str) -> str:
    """Return ``text`` with values of secret keys and passwords in URLs masked."""
    return Redactor().text(text)


class Redactor:
    """The secrets that a process knows, and the masking of them.

    Args:
        secrets: texts to mask, in addition to those that :meth:`learn` finds.
    """

    def __init__(self, secrets: Iterable[str] = ()):
        self._secrets: set[str] = set()
        self._beside_key: set[tuple[str, str]] = set()
        self._forms: tuple[tuple[str, re.Pattern[str] | None], ...] = ()
        self._short: tuple[re.Pattern[str], ...] = ()
        self._add(secrets, ())

    @classmethod
    def of_process(cls) -> Redactor:
        """Return a redactor that knows the secrets in the environment variables of this process."""
        redactor = cls()
        redactor._add(_secrets_in_environment(os.environ), ())
        return redactor

    @property
    def secrets(self) -> tuple[str, ...]:
        """The texts that are masked wherever they appear, the longest first."""
        return tuple(sorted(self._secrets, key=lambda s: (-len(s), s)))

    def learn(self, value: Any) -> None:
        """Remember the secrets in nested mappings, lists and dataclasses, such as a built job."""
        found = list(_find_secrets(value, key=""))
        self._add(
            (secret for key, secret in found if is_distinctive(key, secret)),
            ((key, secret) for key, secret in found if not is_distinctive(key, secret)),
        )

    def text(self, text: str) -> str:
        """Return ``text`` with all secrets masked."""
        for form, pattern in self._forms:
            if form in text:
                text = text.replace(form, MASK) if pattern is None else pattern.sub(MASK, text)
        for pattern in self._short:
            text = pattern.sub(rf"\1{MASK}", text)
        if "PRIVATE KEY" in text:
            text = _mask_private_keys(text)
        return "".join(map(_mask_line, text.splitlines(keepends=True)))

    def data(self, value: Any, *, by_key: bool = True) -> Any:
        """Return a copy of nested mappings, lists and dataclasses with all secrets masked.

        The fields of dataclasses are masked as text only, so that they keep their types.

        Args:
            by_key: mask whatever is under a secret key. Without it, only texts are masked, and numbers stay.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(k) if isinstance(k, str) else k: (
                    MASK if by_key and holds_secret(str(k), v) else self.data(v, by_key=by_key)
                )
                for k, v in value.items()
            }
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.data(v, by_key=by_key) for v in value))
        if isinstance(value, (list, tuple, set, frozenset)):
            pairs = zip((None, *value), value, strict=False)
            return type(value)(
                MASK if (option := _option_before(before)) and _is_of_option(option, v) else self.data(v, by_key=by_key)
                for before, v in pairs
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (f.name for f in dataclasses.fields(value) if f.init)
            return dataclasses.replace(
                value, **{name: self.data(getattr(value, name), by_key=by_key) for name in fields}
            )
        return value

    def copy_file(self, source: Path, target: Path) -> bool:
        """Copy a text file with all secrets masked. Return whether anything was masked."""
        masked = False
        with (
            source.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
            target.open("w", encoding="utf-8", errors="surrogateescape", newline="") as out,
        ):
            while text := "".join(lines.readlines(_CHARACTERS_AT_A_TIME)):
                clean = self.text(text)
                masked = masked or clean != text
                out.write(clean)
        return masked

    def _add(self, secrets: Iterable[str], beside_key: Iterable[tuple[str, str]]) -> None:
        self._secrets.update(secrets)
        self._beside_key.update(beside_key)
        forms = {form for secret in self._secrets for form in written_forms(secret)}
        self._forms = tuple((form, _as_word(form)) for form in sorted(forms, key=lambda f: (-len(f), f)))
        self._short = tuple(
            re.compile(rf"({re.escape(key.rpartition('.')[2])}\W{{1,4}}){re.escape(secret)}(?!\w)")
            for key, secret in sorted(self._beside_key)
        )


class RedactingStream:
    """A text stream that masks secrets in what is written to ``stream``."""

    def __init__(self, stream: IO[str], redactor: Redactor):
        self._stream = stream
        self._redactor = redactor

    def write(self, text: str) -> int:
        """Write ``text`` masked. Return the length of ``text``, as the caller counts its own characters."""
        self._stream.write(self._redactor.text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines`` masked; no line ends are added."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def masked_output(redactor: Redactor) -> Iterator[None]:
    """Mask secrets in what Python code writes to stdout and stderr in this context."""
    out, error = (cast(TextIO, RedactingStream(stream, redactor)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        yield


def written_forms(secret: str) -> set[str]:
    """Return how text may contain ``secret``: as it is, quoted, escaped or percent-encoded.

    A secret of several lines is also masked line by line, because text may be indented or cut.
    """
    forms = {secret, shlex.quote(secret)[1:-1] if "'" in secret else secret}
    forms |= {repr(secret)[1:-1], json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    forms |= {secret.replace("\\", "\\\\").replace(q, f"\\{q}") for q in "'\""}
    # An environment variable may hold bytes that are not UTF-8; Python then has surrogates in their place.
    data = secret.encode(errors="surrogateescape")
    encoded = {quote(data, safe=""), quote(data), quote_plus(data)}
    forms |= encoded | {re.sub(r"%[0-9A-F]{2}", lambda m: m[0].lower(), form) for form in encoded}
    forms |= {line.strip() for line in secret.splitlines()}
    return {form for form in forms if len(form) >= MIN_LENGTH}


def is_distinctive(key: str, secret: str) -> bool:
    """Return whether ``secret``, the value of ``key``, can be masked wherever it appears."""
    is_number = re.fullmatch(r"[\d.eE+-]+", secret) is not None
    if len(secret) < (_MIN_DIGITS if is_number else MIN_LENGTH) or secret.lower() in _ORDINARY:
        return False
    return is_certain(key) or re.fullmatch(r"[a-z]+([_./-][a-z]+)*", secret) is None


def stands_for_secret(override: str) -> bool:
    """Return whether the value of an ``override``, or a password in it, is the mask of a secret."""
    return _IN_PLACE_OF_SECRET.search(override) is not None


def url_secrets(url: str) -> tuple[str, ...]:
    """Return the passwords and tokens in ``url``, as typed and percent-decoded."""
    try:
        parts = urlsplit(url)
        password, user = parts.password, parts.username
        query = parse_qsl(parts.query)
    except ValueError:
        return ()
    token = user if password is None and parts.scheme in ("http", "https") else None
    found = {secret for given in (password, token) if given for secret in (given, unquote(given))}
    found |= {value for key, value in query if is_secret(key) or _is_signature(key)}
    return tuple(sorted((s for s in found - {MASK} if len(s) >= MIN_LENGTH), key=lambda s: (-len(s), s)))


def _secrets_in_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if name not in _WORKING_DIRECTORIES and len(value) >= _MIN_LENGTH_IN_ENVIRONMENT and is_secret(name):
            if is_distinctive(name, value):
                yield value
        elif "://" in value:
            yield from url_secrets(value)


def _find_secrets(value: Any, *, key: str) -> Iterator[tuple[str, str]]:
    """Yield each secret with its dotted key, which begins at the secret. ``key`` is empty outside secrets."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        value = dict(zip(value._fields, value, strict=True))
    if isinstance(value, Mapping):
        for k, v in value.items():
            yield from _find_secrets(v, key=f"{key}.{k}" if key else str(k) if holds_secret(str(k), v) else "")
    elif isinstance(value, (list, tuple, set, frozenset)):
        before: Any = None
        for v in value:
            option = None if key else _option_before(before)
            before = v
            yield from _find_secrets(v, key=option if option and _is_of_option(option, v) else key)
    elif isinstance(value, bytes):
        yield from _find_secrets(value.decode(errors="surrogateescape"), key=key)
    elif key and value is not None and not isinstance(value, bool) and str(value) not in _NOT_SECRET:
        yield key, str(value)
    elif isinstance(value, str):
        if _PRIVATE_KEY_BEGINS.search(value):
            yield "private_key", value
        else:
            if "://" in value:
                yield from (("password", secret) for secret in url_secrets(value))
            for name, start, end in (*_assigned(value), *_after_options(value)):
                yield name, value[start:end]
            yield from (("authorization", found[2]) for found in _AUTHORIZATION.finditer(value))


def _as_word(form: str) -> re.Pattern[str] | None:
    """The pattern of a short form, which must not be a part of a longer word; None if ``form`` is long enough."""
    if len(form) >= _MIN_LENGTH_ALONE:
        return None
    # \n and similar escapes in quoted text end with a letter.
    return re.compile(rf"(?:(?<!\w)|(?<=\\[nrt])){re.escape(form)}(?!\w)")


def _is_signature(name: str) -> bool:
    """Return whether a parameter of a query signs the address, as in ``X-Amz-Signature=...``."""
    return re.split(r"[-_]", name.lower())[-1] in _SIGNATURES


def _mask_line(line: str) -> str:
    """Return ``line`` with secrets masked that are recognised by what is around them."""
    if "://" in line:
        line = _TOKEN_AS_USER.sub(rf"\1{MASK}@", _USER_AND_PASSWORD.sub(rf"\1{MASK}@", line))
    line = _AUTHORIZATION.sub(rf"\1{MASK}", line)
    if not may_name_secret(line):
        return line
    line = _without(line, _assigned(line)) if "=" in line or ":" in line else line
    return _without(line, _after_options(line)) if "--" in line else line


def _without(text: str, found: Iterable[tuple[str, int, int]]) -> str:
    """Return ``text`` with a mask in the place of each span."""
    parts: list[str] = []
    done = 0
    for _, start, end in found:
        parts += [text[done:start], MASK]
        done = end
    return "".join([*parts, text[done:]])


def _assigned(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the secret keys in ``password=...`` and ``{"token": "..."}``, each with the span of its value."""
    position = 0
    while (found := _ASSIGNMENT.search(text, position)) is not None:
        position = found.end()
        name = found["key"]
        in_query = text[max(0, found.start() - 1) : found.start()] in ("?", "&")
        if not (is_secret(name) or (in_query and _is_signature(name))):
            continue
        span = _value_span(text, position)
        if span is None or text[slice(*span)] in _NOT_SECRET:
            continue
        yield name, *span
        position = span[1]


def _after_options(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the secret options of a program in ``--hf-token ...``, each with the span of its value."""
    position = 0
    while (found := _OPTION.search(text, position)) is not None:
        position = found.end()
        if not is_secret(found["name"]):
            continue
        span = _value_span(text, position)
        if span is not None and _is_of_option(found["name"], text[slice(*span)]):
            yield found["name"], *span
            position = span[1]


def _is_of_option(name: str, value: Any) -> bool:
    """Return whether ``value`` may be the secret of an option, and is no other option and no placeholder."""
    is_text = isinstance(value, str) and re.match(r"-|<|[A-Z_]+$", value) is None
    return is_text and value not in _NOT_SECRET and is_distinctive(name, value)


def _option_before(word: Any) -> str | None:
    """Return the name of the secret whose value follows a word of a command; None if it is another word."""
    found = re.fullmatch(r"--([A-Za-z][\w-]*)", word) if isinstance(word, str) else None
    return found[1] if found is not None and is_secret(found[1]) else None


def _value_span(text: str, start: int) -> tuple[int, int] | None:
    """Return where the value is that begins at ``start``, without its quotes; one that is cut ends with the text.

    No character is looked at twice, as it would be if one pattern tried all ways to end a value: a job may print lines
    of any length.
    """
    if opening := _OPENING_QUOTE.match(text, start):
        return opening.end(), _end_of_quoted(text, opening.end(), opening[0])
    if text.startswith(("[", "{", "("), start):
        return start, _end_of_brackets(text, start)
    unquoted = _UNQUOTED.match(text, start)
    return None if unquoted is None else unquoted.span()


def _end_of_quoted(text: str, start: int, opening: str) -> int:
    """Return where a value ends that ``opening`` begins: a quote, after backslashes if the value is in quoted text."""
    depth = len(opening) - 1
    for found in _QUOTES[opening[-1]].finditer(text, start):
        backslashes = len(found[1])
        # At this depth, a backslash of the value is written as 2 * depth + 2 of them; a quote has one more before it.
        if backslashes < depth or backslashes % (2 * depth + 2) == depth:
            return found.end() - 1 - min(backslashes, depth)
    return max(start, len(text.rstrip()))


def _end_of_brackets(text: str, start: int) -> int:
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        depth += 1 if bracket[0] in "[{(" else -1
        if depth == 0:
            return bracket.end()
    return len(text.rstrip())


def _mask_private_keys(text: str) -> str:
    parts: list[str] = []
    done = 0
    while (begin := _PRIVATE_KEY_BEGINS.search(text, done)) and (end := _PRIVATE_KEY_ENDS.search(text, begin.end())):
        parts += [text[done : begin.start()], MASK]
        done = end.end()
    return "".join([*parts, text[done:]])
