"""A job with a secret of every kind, which it repeats in everything that it writes."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Login:
    user: str = "anybody"
    password: str = ""


@dataclass(frozen=True, kw_only=True)
class Secretive(Digits):
    token: str = field(default_factory=lambda: os.environ["PLANTED_BY_FACTORY"])
    aws_secret_access_key: str = field(default_factory=lambda: os.environ["PLANTED_BY_ANOTHER_FACTORY"])
    private_key: str = field(default_factory=lambda: Path(os.environ["PLANTED_KEY_FILE"]).read_text())
    password: str = ""
    passphrase: str = ""
    client_secret: int = 0
    pwd: str = ""
    door_secret: int = 0
    auth: str = ""
    api_key: str = ""
    credentials: str = ""
    hf_tokens: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    login: Login = Login()
    data_url: str = ""
    services: tuple[Mapping[str, Any], ...] = ()
    database: str = ""
    endpoint: str = ""
    command: tuple[str, ...] = ()
    setup: str = ""
    raises: bool = False

    def everything(self) -> list[str]:
        """The secrets, each in a text of its own."""
        known = [self.token, self.aws_secret_access_key, self.private_key, self.password, self.passphrase, self.auth]
        known += [str(self.client_secret), self.pwd, self.api_key, self.credentials, *self.hf_tokens]
        known += [str(self.options), self.login.password, self.data_url, os.environ["PLANTED_ENVIRONMENT_TOKEN"]]
        known += [str(self.services), self.database, self.endpoint, str(self.command), self.setup]
        return [*known, os.environ.get("PLANTED_WORKER_TOKEN", "")]

    def check(self) -> None:
        print("checking", *self.everything(), flush=True)

    def model(self) -> nn.Module:
        print("fingerprint", hashlib.sha256("".join(self.everything()).encode()).hexdigest())
        print(repr(self))
        for text in self.everything():
            print(text)
            print("also on stderr:", text, file=sys.stderr)
            print(repr(text), json.dumps({"text": text}), quote(text))
            sys.stdout.flush()
            if dist.is_initialized():
                os.write(1, f"from C: {text}\n".encode())
        return super().model()

    def loss(self, output: Any, target: Any) -> Tensor:
        if self.raises and torch.is_grad_enabled():
            raise RuntimeError("refused by the server: " + " ".join(self.everything()))
        return super().loss(output, target)

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | None:
        return "\n".join(self.everything())
