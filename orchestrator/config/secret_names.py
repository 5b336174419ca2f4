"""Which names of keys and variables indicate a secret, as pure functions of the words in a name.

A false positive hides a setting from the records; a false negative publishes a secret. Names of language models and of
data, such as ``pad_token``, ``num_tokens`` and ``sort_key``, are therefore listed, and other names of the same form are
secrets.
"""

from __future__ import annotations

import functools
import re


def _words_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_WORDS_OF_SECRETS = _words_in(
    "secret secrets passwords pwd pswd pword passphrases passcode passcodes pincode credentials creds auth "
    "authorization bearer jwt jwts webhook apikeys mnemonic mnemonics"
)
_ENDS_OF_WORDS_OF_SECRETS = (
    *("password", "passwd", "passphrase", "secret", "credential", "authkey", "apikey", "accesskey", "secretkey"),
    *("privatekey", "apitoken", "authtoken", "accesstoken", "passkey", "dbpass", "userpass", "sshpass"),
    *("privkey", "sshkey", "masterkey", "signingkey", "encryptionkey", "refreshtoken", "sessiontoken", "adminpass"),
    *("rootpass", "sessionid", "sessid", "connectionstring", "connstring", "connstr"),
)
"""Words that names also have without a separator: ``sslpassword``, ``clientsecret``."""
_LAST_WORDS_OF_SECRETS = _words_in("pat cookie cookies sas otp totp hotp psk cred oauth dsn dsns")
_NAMES_OF_PROPERTIES = _words_in(
    "file path dir folder mode type method kind scheme host port timeout ttl retries enabled required provider name "
    "env var variable sock socket dim size len length count limit rate ratio dropout ids"
)
"""As the last word, these name a property of a secret and not its value: ``token_path``, ``auth_mode``."""
_OWNERS_OF_CREDENTIALS = _words_in(
    "api auth access secret private refresh bearer hf huggingface hub github gh gitlab git wandb mlflow slack openai "
    "anthropic session service deploy csrf jwt registry pypi npm azure aws gcp google databricks ray account license "
    "master signing encryption ssh ssl tls hmac aes rsa pgp gpg user bot admin client storage"
)
"""Before ``tokens``, ``keys``, or a ``token`` or ``key`` that is not the last word."""
_BEFORE_TOKENS_OF_TEXT = _words_in(
    "pad padding eos bos unk sep cls mask class blank begin end start stop first last next new prev previous current "
    "max min num per special image video audio speech text prompt decoder encoder input output target special label "
    "context newline space word sub ms us s seconds cost flops bytes loss samples"
)
_BEFORE_KEYS_OF_DATA = _words_in(
    "sort group primary foreign public cache input inputs output outputs target targets label labels image images text "
    "data dataset batch metric metrics feature features query value dict sample id column index lookup partition shard "
    "state model layer loss weight weights param parameter join row field json config monitor audio video prompt "
    "response question answer hot short by order split mask attention attn num no any each per"
)
_BEFORE_PASSES_OF_COMPUTATION = _words_in(
    "forward backward first second third last next prev previous current one two single double multi multiple num no n "
    "max min per each every is did has all any by low high band notch full half partial extra additional final initial "
    "early late pre post warmup train training eval evaluation test tests val validation inference prefill decode "
    "render depth color shadow geometry optimizer optimization compiler compile fusion fused quant quantization graph "
    "fx joint grad inductor custom lowering data epoch step batch layer fast slow dry zero skip up down"
)
_BEFORE_SECRET_CODES = _words_in(
    "pin recovery backup scratch verification security access login unlock invite master emergency otp totp mfa 2fa fa "
    "factor sms"
)
"""Before ``code`` or ``codes``. Others are ordinary: ``exit_code``, ``language_code``."""
_BEFORE_PINS_OF_HARDWARE = _words_in(
    "gpio led cpu cpus gpu core cores thread threads numa memory io input output data clock reset power ground signal "
    "is no use do should num each per first last in out to"
)
_FILES_OF_SECRETS = _words_in("keyfile pemfile")
_CONTENTS = _words_in("content contents json data text string base64 b64")
"""After the name of a file: ``keyfile`` is a path, and ``keyfile_json`` is what is there."""
_VALUES_OF_TOKENS = _words_in("value text string str bytes base64 b64 header")
_OWNERS_OF_PW = _words_in(
    "user db database smtp ftp mysql postgres redis root admin login http proxy mail bind ldap vpn wifi sudo ssh"
)
_IF_AFTER = {
    **dict.fromkeys(("token", "tokens", "key", "keys"), _OWNERS_OF_CREDENTIALS),
    **dict.fromkeys(("code", "codes"), _BEFORE_SECRET_CODES),
    **dict.fromkeys(("string", "strings", "str"), _words_in("connection connections conn")),
    "phrase": _words_in("seed recovery backup wallet"),
    "id": _words_in("session sess"),
    "pw": _OWNERS_OF_PW,
}
"""Words that are secrets after one of these words."""
_UNLESS_AFTER = {
    "token": _BEFORE_TOKENS_OF_TEXT,
    "key": _BEFORE_KEYS_OF_DATA,
    "pass": _BEFORE_PASSES_OF_COMPUTATION,
    "pin": _BEFORE_PINS_OF_HARDWARE,
}
"""Words that are secrets as the last one of a name, unless after one of these words. Only ``token`` is one alone."""
_MAYBE_ORDINARY = _words_in("id code codes pin dsn dsns")
"""As the last word of a secret, these do not make its value one beyond doubt."""
_LONGEST_REMEMBERED = 256
"""What has the form of a name may be a megabyte of Base64."""
_PUBLIC_NAMES = frozenset([("view", "state", "share", "key")])
"""Names that only look like names of secrets: a parameter of the links to MLflow's pages."""
_PARTS_OF_SECRET_NAMES = _words_in(
    "token key secret pass pwd cred auth bearer jwt webhook cookie pat sig mnemonic otp sas psk pw phrase pswd pword "
    "pin code dsn conn sess pemfile"
)
"""Every secret name contains one of these, as do the parameters with which a URL is signed."""


def is_secret(key: str) -> bool:
    """Return whether the name of ``key``, or a part of a dotted ``key``, indicates a secret."""
    return (_is_secret_key if len(key) <= _LONGEST_REMEMBERED else _is_secret_key.__wrapped__)(key)


@functools.lru_cache(maxsize=4096)
def _is_secret_key(key: str) -> bool:
    return any(_is_secret(_words(part)) for part in re.split(r"[^\w-]+", key))


@functools.lru_cache(maxsize=4096)
def is_certain(key: str) -> bool:
    """Return whether a value of ``key`` is a secret beyond doubt, so that it is masked wherever it appears.

    ``prompt_style_key`` and ``session_id`` have the form of a secret but may hold an ordinary word.
    """
    return any(
        _is_secret(words)
        and words[-1] not in _MAYBE_ORDINARY
        and not (words[-1] == "key" and words[-2] not in _OWNERS_OF_CREDENTIALS)
        for words in map(_words, re.split(r"[^\w-]+", key))
    )


def may_name_secret(text: str) -> bool:
    """Return False if no word in ``text`` is the name of a secret. Faster than looking at each word."""
    text = text.lower().replace("path", "")
    return any(part in text for part in _PARTS_OF_SECRET_NAMES)


def _words(name: str) -> tuple[str, ...]:
    """Split ``hf_token``, ``HF_TOKEN`` and ``hfToken`` into ``("hf", "token")``."""
    return tuple(word.lower() for word in _WORD.findall(name))


def _is_secret(words: tuple[str, ...]) -> bool:
    if not words or words in _PUBLIC_NAMES or words[-1] in _NAMES_OF_PROPERTIES:
        return False
    if any(word in _WORDS_OF_SECRETS or word.endswith(_ENDS_OF_WORDS_OF_SECRETS) for word in words):
        return True
    if words[-1] in _LAST_WORDS_OF_SECRETS:
        return True
    if len(words) > 1 and words[-1] in _VALUES_OF_TOKENS and words[-2] in _LAST_WORDS_OF_SECRETS:
        return True
    return any(
        _names_secret(word, before=before, last=None if i == len(words) - 1 else words[-1])
        for i, (before, word) in enumerate(zip((None, *words), words, strict=False))
    )


def _names_secret(word: str, *, before: str | None, last: str | None) -> bool:
    """Return whether ``word`` makes a secret of the name. ``last`` is the last word of the name, None if it is this."""
    if last is None and word in _UNLESS_AFTER:
        return (before is not None or word == "token") and before not in _UNLESS_AFTER[word]
    if before in _IF_AFTER.get(word, ()):
        return True
    return (word == "token" and last in _VALUES_OF_TOKENS) or (word in _FILES_OF_SECRETS and last in _CONTENTS)
