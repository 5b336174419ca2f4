"""Secrets reach no file and no message; what only looks like one stays readable."""

import base64
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from helpers.files.golden import Golden
from helpers.machines.plans import config_of
from orchestrator import features
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_job, unmasked
from orchestrator.config.overrides import masked
from orchestrator.config.recorded_config import overrides_to_evaluate, recorded_job, to_dict, to_yaml
from orchestrator.config.redact import (
    MASK,
    RedactingStream,
    Redactor,
    holds_secret,
    redact,
    redact_text,
    stands_for_secret,
    url_secrets,
)
from orchestrator.config.schema import JobSpec
from orchestrator.config.secret_names import is_secret, may_name_secret
from orchestrator.config.text import format_override
from orchestrator.driver.preflight.run_config import plain_fields
from orchestrator.job import Job
from orchestrator.planning.plan import Plan
from orchestrator.protocol.events import Event
from orchestrator.strategies import registry


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "HF_TOKEN", "job.api_token", "accessToken", "auth.token.value", "token_file_text"),
        *("secret", "client_secret", "password", "passwd", "passphrase", "credentials", "api_key", "apikey"),
        *("aws_access_key_id", "private_key", "aws_secret_access_key", "AWS_SESSION_TOKEN", "x-api-key", "APIKey"),
        *("pwd", "db_pwd", "auth", "http_auth", "authorization", "bearer", "jwt", "github_pat", "slack_webhook_url"),
        *("sslpassword", "clientsecret", "hf_tokens", "api_tokens", "access_keys", "api_keys", "license_key"),
        *("storage_account_key", "signing_key"),
        *("smtp_pass", "db_pass", "auth_token", "hfToken", "token_value", "session_cookie", "ssh_key", "creds"),
        *("ADMIN_PASS", "gpg_pass", "SSHPASS", "LDAP_BIND_PW", "AZURE_STORAGE_SAS", "WALLET_MNEMONIC", "seed_phrase"),
        *("OTP", "mfa_totp", "wifi_psk", "DB_CRED", "passkey", "a." * 300 + "token", "long_" * 100 + "password"),
        *("PIN_CODE", "pinCode", "RECOVERY_CODE", "backup_codes", "mfa_code", "card_pin", "job.hsm_pin", "2fa_code"),
        *("SENTRY_DSN", "dsn", "job.db_dsn", "CONNECTION_STRING", "CONN_STR", "AZURE_STORAGE_CONNECTION_STRING"),
        *("connectionString", "db_connstr", "connection_str", "ConnectionStrings", "keyfile_json", "KEYFILE_CONTENT"),
        *("JWT", "id_jwts", "BEARER", "COOKIE", "cookie_header", "SESSION_ID", "sessionId", "JSESSIONID", "PHPSESSID"),
        *("privkey", "SSHKEY", "signingkey", "db_pswd", "PASSCODES", "otp_value"),
        *("job.auth", "job.options.pwd", "AccountKey", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "RAY_AUTH_TOKEN"),
    ],
)
def test_names_of_secrets(key: str) -> None:
    assert is_secret(key)
    assert may_name_secret(key)
    assert holds_secret(key, "hunter2")


@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer", "job.tokenizer.path", "tokenize", "num_tokens", "tokens_per_sample", "max_tokens"),
        *("pad_token", "eos_token", "bos_token", "mask_token", "key", "keys", "path", "passes", "hidden"),
        *("num_keys", "key_dim", "author", "authors", "monkey", "keyboard", "turkey", "passed", "forward_pass"),
        *("token_id", "pad_token_id", "token_type_ids", "token_dropout", "tokens", "tokens_per_s", "loss_per_token"),
        *("special_tokens", "sort_key", "image_key", "public_key", "missing_keys", "key_padding", "secretary"),
        *("token_file", "password_file", "auth_mode", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "SSH_AUTH_SOCK"),
        *("credentials_path", "secret_name", "compass", "bypass", "authentic", "tokenized", "passengers", "opwd"),
        *("backward_pass", "num_pass", "quant_pass", "pass", "passphrase_file", "bypass", "overpass", "low_pass"),
        *("otp_length", "mnemonic_path", "phrase", "conv_pw", "sas_file", "credit", "stop_phrase", "disaster"),
        *("pin_memory", "pin", "gpio_pin", "pinned", "spin", "cpu_pin", "code", "exit_code", "status_code", "zip_code"),
        *("language_code", "source_code", "encoder", "decode", "codes", "codebook", "num_codes", "code_dim"),
        *("session", "session_name", "session_dir", "num_sessions", "id", "ids", "job_id", "connection", "max_conn"),
        *("conn_timeout", "string", "str", "format_string", "keyfile", "SSL_KEYFILE", "json", "data", "text", "secant"),
        *("cookie_path", "connection_string_env", "jwt_file", "recovery", "recovery_mode", "backup", "code_path"),
        "viewStateShareKey",
    ],
)
def test_names_that_only_look_like_secrets(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.parametrize(
    ("key", "value", "hidden"),
    [
        ("token_dim", 64, False),
        ("token_dropout", 0.5, False),
        ("token", 31415926, True),
        ("password", "", False),
        ("token", "abc", True),
        ("password", 1234, True),
        ("password", None, False),
        ("use_token", True, False),
    ],
)
def test_a_password_may_be_a_number_but_not_a_switch(key: str, value: Any, hidden: bool) -> None:
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
        ("https://ghp_abc@host/x.git", f"https://{MASK}@host/x.git"),
        ("ssh://git@host", "ssh://git@host"),
        ("https://bucket/x?X-Amz-Signature=abc&sig=d", f"https://bucket/x?X-Amz-Signature={MASK}&sig={MASK}"),
        ("sqlite:////tmp/mlflow.db", "sqlite:////tmp/mlflow.db"),
        ("mail me@home: now", "mail me@home: now"),
    ],
)
def test_passwords_in_addresses(text: str, clean: str) -> None:
    assert redact_text(text) == clean


def test_secrets_in_the_texts_of_a_configuration_are_known() -> None:
    redactor = Redactor()
    redactor.learn({"args": ["--hf-token", "hf_1a2b3c"], "setup": "PASSWORD=pw-1a2b3c x --api-key sk-1a2b3c"})
    assert {*redactor.secrets} == {"hf_1a2b3c", "pw-1a2b3c", "sk-1a2b3c"}
    assert redactor.data(["--hf-token", "hf_1a2b3c", "--lr", "0.1"]) == ["--hf-token", MASK, "--lr", "0.1"]


def test_known_secrets_are_masked_in_free_text_the_longest_first() -> None:
    redactor = Redactor()
    redactor.learn({"job": {"token": "abcd", "password": "abcdef", "credentials": {"user": "root1"}}})
    assert redactor.secrets == ("abcdef", "root1", "abcd")
    assert redactor.text("abcdef abcd root1 abc") == f"{MASK} {MASK} {MASK} abc"


def test_short_values_are_not_hunted_in_free_text() -> None:
    redactor = Redactor()
    redactor.learn({"token": "abc", "password": 7, "token_dim": 4096, "tokenizer": "gpt2"})
    assert redactor.secrets == ()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("job.password=hunter2: not welcome", f"job.password={MASK}: not welcome"),
        ("Job(pwd='a b', hidden=8)", f"Job(pwd='{MASK}', hidden=8)"),
        ("{'api_key': 12, 'depth': 3}", f"{{'api_key': {MASK}, 'depth': 3}}"),
        ('{"auth": "x\\"y", "depth": 3}', f'{{"auth": "{MASK}", "depth": 3}}'),
        ("Job(hf_tokens=('a', 'b'), hidden=8)", f"Job(hf_tokens={MASK}, hidden=8)"),
        ('{\\"token\\": \\"abc\\"}', f'{{\\"token\\": \\"{MASK}\\"}}'),
        ("hf_tokens=[a,b] steps=7", f"hf_tokens={MASK} steps=7"),
        ("text with \\\\ntoken=abc", f"text with \\\\ntoken={MASK}"),
        ("--api-token=abc", f"--api-token={MASK}"),
        ("DB_PASSWORD=x DB_HOST=y", f"DB_PASSWORD={MASK} DB_HOST=y"),
        ("Authorization: Bearer abc123def456", f"Authorization: Bearer {MASK}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", MASK),
        ("-----BEGIN PRIVATE KEY-----\na\n-----BEGIN PRIVATE KEY-----b-----END PRIVATE KEY----- c", f"{MASK} c"),
        ('{"id": 1, "token": "\\u4e2d\\u65', f'{{"id": 1, "token": "{MASK}'),
        ('{"token": "ends with \\\\", "depth": 3}', f'{{"token": "{MASK}", "depth": 3}}'),
        ('{\\"token\\": \\"a\\\\\\"b\\", \\"depth\\": 3}', f'{{\\"token\\": \\"{MASK}\\", \\"depth\\": 3}}'),
        ('{"text": "{\\"token\\": \\"abc", "depth": 3}', f'{{"text": "{{\\"token\\": \\"{MASK}", "depth": 3}}'),
        ("credentials={'a': {'b': 'c'}, 'd': 'e'} x", f"credentials={MASK} x"),
        ("hf_tokens=[[a,b],[c]] hf_tokens=[a, b", f"hf_tokens={MASK} hf_tokens={MASK}"),
        ("1--token=abc, x--password=abc", f"1--token={MASK}, x--password={MASK}"),
        ("train --hf-token hf_1a2b --lr 1", f"train --hf-token {MASK} --lr 1"),
        ("['--api-key', 'sk-1a2b', '--lr', '1']", f"['--api-key', '{MASK}', '--lr', '1']"),
        ("job.args=[--api_key,sk-1a2b,--lr]", f"job.args=[--api_key,{MASK},--lr]"),
    ],
)
def test_values_are_masked_beside_their_key(text: str, clean: str) -> None:
    assert redact_text(text) == clean
    assert redact_text(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "job.password: missing; give it a value",
        "job.token=null",
        "if token == end:",
        "Basic authentication is off",
        "tokens_per_sample=128, num_keys=4, key_dim=64, author='me'",
        "train.steps=7: expected a whole number",
        "usage: train [--token TOKEN] [--api-key <key>] --password --lr 1 --max-tokens 1024",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        *(("", character) for character in "\\\"'=:.-_/+@?&%#[]{}()<>,;|~^$*! \t\na0Aé"),
        *(('token="', character) for character in "\\\"'=:.[{( \na"),
        *((start, "\\u4e2d") for start in ('{"token": "', "{'token': '", '{\\"token\\": \\"', "token=", "token=[")),
        *(
            ("", part)
            for part in ("token=[ ", "token={ ", "token=( ", "token=[(", 'token=" ', "token='a\\' ", "token=, ")
        ),
        *(
            ("", part)
            for part in ('token=\\" token=\\\\\\" ', '{"token": "a", ', '{"token": {"a": ', "token=None ", '"token": "')
        ),
        *(
            ("", part)
            for part in ("aB", "a.", "a_", "a-", "a--", "a.-", "aB3+", "--a", "\\na", "\\n-", "a\\", "aB3=", "a=b&")
        ),
        *(
            ("", part)
            for part in ("http://a", "http://a:", "a://b:c", "https://b@", "x:y@", "://", "?token=a&", "http://a/?sig=")
        ),
        *(("Bearer ", character) for character in " a1=B"),
        *(("", part) for part in ("Bearer ", "Basic a", "Bearer\t", "Authorization: ")),
        *(("", part) for part in ("-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "-----END ", "PRIVATE KEY ", "-")),
        *(("-----BEGIN ", part) for part in ("A", "PRIVATE KEY ", "PRIVATE KEY-----", "-----END PRIVATE KEY")),
        *(("hunter22", part) for part in ("hunter", "hunter22", "door_secret", "door_secret: ", "\n")),
    ],
)
def test_the_time_of_masking_grows_with_the_text_alone(start: str, repeated: str) -> None:
    """Where it grows with the square, these lines of 50,000 characters take minutes and more."""
    redactor = Redactor(["hunter22"])
    redactor.learn({"door_secret": 12})
    line = start + repeated * (50_000 // len(repeated))
    redactor.text("\n".join(line + end for end in ("", "\n", '"', "=x", ": 'x")))
    is_secret(line)


@pytest.mark.parametrize(
    "written",
    [
        *("{s}", "'{s!r}'", "url?x={q}", "Authorization: Basic {basic}"),
        *('{{"message": {j}}}', "three words before {s}, and more"),
    ],
)
def test_a_known_secret_is_masked_in_every_written_form(written: str) -> None:
    secret = 'it\'s "quoted" \\ ö/+&%='
    redactor = Redactor()
    redactor.learn({"job": {"nested": [{"password": secret}]}})
    text = written.format(
        s=secret,
        q=quote(secret),
        basic=base64.b64encode(f"user:{secret}".encode()).decode(),
        j=json.dumps({"text": secret}),
    )
    clean = redactor.text(text)
    assert MASK in clean
    assert not any(piece in clean for piece in ("quoted", "%22", "cXVvdGVk", "1b3RlZ", "dW90ZW"))


def test_a_secret_of_several_lines_is_masked_line_by_line(tmp_path: Path) -> None:
    redactor = Redactor()
    redactor.learn({"ssh_key": "first-line\nsecond-line\n"})
    (tmp_path / "log").write_text("  first-line\n| second-line |\nthird line\n")
    assert redactor.copy_file(tmp_path / "log", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == f"  {MASK}\n| {MASK} |\nthird line\n"
    assert not redactor.copy_file(tmp_path / "copy", tmp_path / "again")


def test_a_file_that_is_not_utf8_is_copied_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe hunter22\r\nno newline")
    assert Redactor(["hunter22"]).copy_file(tmp_path / "log", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"\xff\xfe ***\r\nno newline"


def test_a_short_secret_is_masked_beside_its_key_only() -> None:
    redactor = Redactor()
    redactor.learn({"door_secret": 1, "pwd": "zq7k", "pin_password": 12345})
    assert redactor.text("step 1 of 12345: door_secret: 1, {'door_secret': 1}, door_secret: 12") == (
        f"step 1 of 12345: door_secret: {MASK}, {{'door_secret': {MASK}}}, door_secret: 12"
    )
    assert redactor.text("zq7k zq7ker 'zq7k' \\nzq7k") == f"{MASK} zq7ker '{MASK}' \\n{MASK}"


def test_ordinary_words_are_masked_beside_their_key_only() -> None:
    redactor = Redactor()
    redactor.learn({"style_key": "photo_style", "password": "password", "auth": "none"})
    text = "photo_style, password and none"
    assert redactor.text(text) == text
    assert redact({"style_key": "photo_style"}) == {"style_key": MASK}


def test_the_secrets_of_a_built_object_are_known() -> None:
    @dataclass(frozen=True)
    class Login:
        user: str
        password: str

    @dataclass(frozen=True)
    class Holder:
        login: Login
        auth: dict[str, str]
        hf_tokens: frozenset[str]
        made: str = field(init=False, default="https://token-in-url@host")

    redactor = Redactor()
    redactor.learn(Holder(Login("anybody", "password-1"), {"value": "auth-value-2"}, frozenset(["hf-3333"])))
    assert set(redactor.secrets) == {"password-1", "auth-value-2", "hf-3333", "token-in-url"}


def test_secrets_of_the_environment_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "from-environment-1")
    monkeypatch.setenv("DB_PASSWORD", "root")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:proxy-password@proxy")
    monkeypatch.setenv("BROKEN_API_TOKEN", "not utf-8: \udcff\udcfe")
    monkeypatch.setenv("PWD", "/srv/somebody/project")
    text = "from-environment-1 /srv/root/x proxy-password /srv/somebody/project"
    assert Redactor.of_process().text(text) == f"{MASK} /srv/root/x {MASK} /srv/somebody/project"


def test_a_stream_masks_what_is_written() -> None:
    out = io.StringIO()
    stream = RedactingStream(out, Redactor(["hunter22"]))
    print("hello", "hunter22", file=stream)  # type: ignore[call-overload]
    stream.writelines(["a hunter22\n"])
    assert out.getvalue() == f"hello {MASK}\na {MASK}\n"
    assert not stream.isatty()


@pytest.mark.parametrize(
    ("word", "clean"),
    [
        ("job.password=[a,b]", f"job.password={MASK}"),
        ("job.pwd='it\\'s'", f"job.pwd={MASK}"),
        ("+job.pin_secret=7", f"+job.pin_secret={MASK}"),
        ("job.options={password:7,depth:3}", f"job.options={{password:{MASK},depth:3}}"),
        (
            "job.options={password:'a b',version:1.10,token:null}",
            f"job.options={{password:{MASK},version:1.10,token:null}}",
        ),
        ("tracking.uri='http://me:pw@h'", f"tracking.uri='http://{MASK}@h'"),
        ("job.path='a b'", "job.path='a b'"),
    ],
)
def test_overrides_are_masked_by_key(word: str, clean: str) -> None:
    assert masked(word, Redactor()) == clean


@pytest.mark.parametrize(
    "word",
    [
        f"job.password={MASK}",
        f"tracking.uri='http://{MASK}@host'",
        f"tracking.uri='http://host/?api_key={MASK}&a=b'",
        f"job.options={{password:{MASK},depth:3}}",
    ],
)
def test_a_mask_is_no_secret_to_train_with(word: str, golden: Golden) -> None:
    errors: list[str] = []
    compose([word], errors, registry.config_class)
    golden.says(errors)


def test_a_mask_after_an_option_stands_for_a_secret() -> None:
    assert stands_for_secret("job.args='--hf-token *** --lr 1'")
    assert stands_for_secret("job.args=[--hf-token,***]")


def test_stars_in_other_values_are_no_mask() -> None:
    errors: list[str] = []
    compose(["job=names", "job.path='*** three stars'"], errors, registry.config_class)
    assert errors == []


def test_no_key_of_the_configuration_or_of_the_records_looks_like_a_secret() -> None:
    config = config_of()
    names = [*_names(to_dict(config)), *(f.name for cls in _classes_of_records() for f in fields(cls))]
    assert [name for name in names if is_secret(name)] == []


def _names(section: Mapping[str, Any]) -> Iterator[str]:
    for name, value in section.items():
        yield name
        if isinstance(value, Mapping):
            yield from _names(value)


def _classes_of_records() -> list[Any]:
    cursors = [found.Cursor for found in features.modules("transfer")]
    return [Plan, *cursors, *Event.__subclasses__()]


def test_urls_have_their_secrets_found() -> None:
    assert set(url_secrets("https://me:pass%20word@host/?access_token=abcd")) == {"pass%20word", "pass word", "abcd"}
    assert url_secrets("postgresql://somebody@host") == url_secrets("http://[") == ()


@pytest.mark.parametrize(
    "words",
    [
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


@dataclass(frozen=True, kw_only=True)
class LeakyFactory(Leaky):
    password: str = field(default_factory=lambda: os.environ["NAME_THAT_TELLS_NOTHING"])


@dataclass(frozen=True, kw_only=True)
class LeakyConstruction(LeakyFactory):
    def __post_init__(self) -> None:
        raise ValueError(f"cannot log in with {self.password}")


@dataclass(frozen=True, kw_only=True)
class LeakyNestedConstruction(Leaky):
    password: str = ""
    login: Mapping[str, str] = field(default_factory=lambda: {"password": os.environ["NAME_THAT_TELLS_NOTHING"]})

    def __post_init__(self) -> None:
        raise ValueError(f"cannot log in with {self.login['password']}")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (LeakyFactory, f"job.password={MASK}: not welcome"),
        (LeakyConstruction, f"job: cannot log in with {MASK}"),
        (LeakyNestedConstruction, f"job: cannot log in with {MASK}"),
    ],
)
def test_a_secret_of_a_default_factory_is_not_repeated(
    cls: type[Leaky], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAME_THAT_TELLS_NOTHING", "hunter2")
    errors: list[str] = []
    redactor = Redactor()
    assert load_job(JobSpec(target=f"{__name__}.{cls.__name__}", fields={}), errors, redactor) is None
    assert errors == [message]
    assert redactor.secrets == ("hunter2",)


@dataclass(frozen=True, kw_only=True)
class Login:
    user: str = "anybody"
    password: str = field(default_factory=lambda: os.environ["NAME_THAT_TELLS_NOTHING"])


@dataclass(frozen=True, kw_only=True)
class Recorded(LeakyFactory):
    login: Login = field(default_factory=Login)
    hf_tokens: tuple[str, ...] = field(default_factory=lambda: (os.environ["NAME_THAT_TELLS_NOTHING"],))
    url: str = field(default_factory=lambda: f"https://me:{os.environ['NAME_THAT_TELLS_NOTHING']}@host/x")
    path: str = field(default_factory=lambda: f"/data/{os.environ['NAME_THAT_TELLS_NOTHING']}")
    api_key: str = ""
    text: str = ""
    width: int = 1

    def check(self) -> None:
        """Accept all."""


def recorded(folder: Path, **fields: Any) -> Path:
    """The record of a job with these fields."""
    errors: list[str] = []
    redactor = Redactor()
    job = load_job(JobSpec(target=f"{__name__}.Recorded", fields=fields), errors, redactor)
    assert errors == []
    data = redactor.data({"job": {"_target_": f"{__name__}.Recorded", **plain_fields(job)}})  # type: ignore[arg-type]
    assert "hunter2" not in str(data)
    file = folder / "config.yaml"
    file.write_text(to_yaml(data))
    return file


def test_a_recorded_job_has_the_secrets_of_its_defaults_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME_THAT_TELLS_NOTHING", "hunter2")
    file = recorded(tmp_path, login={"user": "me"}, text="*** three stars", width=7)
    errors: list[str] = []
    expected = Recorded(login=Login(user="me"), text="*** three stars", width=7)
    assert load_job(unmasked(recorded_job(file), errors), errors) == expected
    _, spec = compose(overrides_to_evaluate(file, []), errors, registry.config_class)
    assert spec is not None
    assert load_job(spec, errors) == expected
    assert errors == []


def test_a_recorded_secret_without_a_default_is_refused_unless_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setenv("NAME_THAT_TELLS_NOTHING", "hunter2")
    file = recorded(tmp_path, api_key="hunter22")
    errors: list[str] = []
    unmasked(recorded_job(file), errors)
    golden.says(errors)
    with pytest.raises(ValueError, match=r"job\.api_key"):
        overrides_to_evaluate(file, [])
    _, spec = compose(overrides_to_evaluate(file, ["job.api_key=mine"]), [], registry.config_class)
    assert spec is not None
    assert load_job(spec, []) == Recorded(api_key="mine")
    monkeypatch.delenv("NAME_THAT_TELLS_NOTHING")
    unmasked(recorded_job(file), errors)
    assert len(errors) == 6
