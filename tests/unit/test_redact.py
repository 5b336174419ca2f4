"""Secrets reach no file and no message; what only looks like one stays readable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.config.build import format_override
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_job
from orchestrator.config.redact import MASK, holds_secret, is_secret, redact, redact_text, secret_values
from orchestrator.config.schema import JobSpec
from orchestrator.job import Job
from orchestrator.strategies import registry


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "HF_TOKEN", "job.api_token", "accessToken", "auth.token.value", "token_file_text"),
        *("secret", "client_secret", "password", "passwd", "passphrase", "credentials", "api_key", "apikey"),
        *("aws_access_key_id", "private_key"),
    ],
)
def test_names_of_secrets(key: str) -> None:
    assert is_secret(key)
    assert holds_secret(key, "hunter2")


@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer", "job.tokenizer.path", "tokenize", "num_tokens", "tokens_per_sample", "max_tokens"),
        *("pad_token", "eos_token", "bos_token", "mask_token", "key", "keys", "path", "passes", "hidden"),
    ],
)
def test_names_that_only_look_like_secrets(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.parametrize(
    ("key", "value", "hidden"),
    [
        ("token_dim", 64, False),
        ("token_dropout", 0.5, False),
        ("token", "abc", True),
        ("password", 1234, True),
        ("password", None, False),
        ("use_token", True, False),
    ],
)
def test_numbers_of_tokens_are_no_secrets_but_a_password_may_be_a_number(key: str, value: Any, hidden: bool) -> None:
    assert holds_secret(key, value) == hidden
    assert (MASK in format_override(key, value)) == hidden


def test_nested_values_are_masked_and_the_original_is_untouched() -> None:
    data = {
        "job": {"api_key": "k", "tokenizer": "bytes", "list": [{"password": "p"}, 3], "token": None},
        "credentials": {"user": "u", "key": "v"},
        "uri": "http://me:pw@host/",
    }
    assert redact(data) == {
        "job": {"api_key": MASK, "tokenizer": "bytes", "list": [{"password": MASK}, 3], "token": None},
        "credentials": MASK,
        "uri": f"http://{MASK}@host/",
    }
    assert data["job"]["api_key"] == "k"  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://user:pw@host:5000/x", f"http://{MASK}@host:5000/x"),
        ("postgresql+psycopg2://user:p@ss@host/db", f"postgresql+psycopg2://{MASK}@host/db"),
        ("http://:pw@host", f"http://{MASK}@host"),
        ("two http://a:b@c and http://d:e@f", f"two http://{MASK}@c and http://{MASK}@f"),
        ("mysql://h/db?password=abc&a=b", f"mysql://h/db?password={MASK}&a=b"),
        ("http://h/?a=b&access_token=xyz'", f"http://h/?a=b&access_token={MASK}'"),
        ("http://host:5000/path@home", "http://host:5000/path@home"),
        ("http://user@host", "http://user@host"),
        ("sqlite:////tmp/mlflow.db", "sqlite:////tmp/mlflow.db"),
        ("mail me@home: now", "mail me@home: now"),
    ],
)
def test_passwords_in_addresses(text: str, clean: str) -> None:
    assert redact_text(text) == clean


def test_known_secrets_are_masked_in_free_text_the_longest_first() -> None:
    secrets = secret_values({"job": {"token": "abcd", "password": "abcdef", "credentials": {"user": "root1"}}})
    assert secrets == ("abcdef", "root1", "abcd")
    assert redact_text("abcdef abcd root1 abc", secrets) == f"{MASK} {MASK} {MASK} abc"


def test_short_values_are_not_hunted_in_free_text() -> None:
    assert secret_values({"token": "abc", "password": 7, "token_dim": 4096, "tokenizer": "gpt2"}) == ()


@pytest.mark.parametrize(
    "words",
    [
        ["job.password=[hunter2]", "job.password=hunter2"],
        ["job.password=hunter2,hunter2"],
        ["job.password='hunter2"],
        ["password=hunter2"],
        ["tracking.password=hunter2"],
        ["+tracking.api_key={a: hunter2}"],
    ],
)
def test_messages_about_secrets_do_not_repeat_them(words: list[str]) -> None:
    errors: list[str] = []
    compose(words, errors, registry.config_class)
    assert errors
    assert "hunter2" not in "\n".join(errors)
    assert "password" in "\n".join(errors) or "api_key" in "\n".join(errors)


@dataclass(frozen=True, kw_only=True)
class Leaky(Job):
    password: str

    def model(self) -> Any: ...
    def dataset(self, split: str) -> Any: ...
    def loss(self, output: Any, target: Any) -> Any: ...
    def optimizer(self, parameters: Any) -> Any: ...

    def check(self) -> None:
        raise ValueError(f"job.password={self.password}: not welcome")


def test_a_job_that_repeats_its_secret_is_not_repeated() -> None:
    errors: list[str] = []
    spec = JobSpec(target=f"{__name__}.Leaky", fields={"password": "hunter2"})
    assert load_job(spec, errors) is None
    assert errors == [f"job.password={MASK}: not welcome"]
