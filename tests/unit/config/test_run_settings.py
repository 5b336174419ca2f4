"""What tells a run from others is in its name: what its user has given and what changes results, in a few words."""

import pytest

from orchestrator.config.overrides import masked
from orchestrator.config.redact import MASK, Redactor
from orchestrator.config.text import settings_of_run


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("strategy=ddp job=digits job.lr=0.03", "lr=0.03"),
        ("name=mine strategy=ddp job.lr=0.03", "lr=0.03 strategy=ddp"),
        ("job.lr=1 job.lr=2", "lr=2"),
        ("train.steps=9 train.log_every=1 checkpoint.every=2 seed=1 job.lr=3", "lr=3 steps=9 seed=1"),
        ("strategy.num_workers=2 data.num_workers=4", "strategy.num_workers=2 data.num_workers=4"),
        ("experiment=quick +job.extra=1 ~job.lr seed=3", "extra=1 experiment=quick seed=3"),
        ("tracking.uri=x display.metrics=[a] cluster.device=cpu output_dir=o resume=auto recovery.spares=1", ""),
        ("--config-dir mine job.lr=1", "lr=1"),
        ("job.a=1 job.b=2 job.c=3 job.d=4 job.e=5", "a=1 b=2 c=3 d=4 ..."),
        (f"job.a={'x' * 100} job.b=2", f"a={'x' * 75}..."),
        ("job._target_=my.Job job.lr=1 strategy=ddp evaluate=last", ""),
        ("", ""),
    ],
)
def test_settings(words: str, text: str) -> None:
    assert settings_of_run(words.split()) == text


def test_secrets_are_masked() -> None:
    words = [masked(word, Redactor()) for word in ("job.password=hunter2", "job.url=http://me:hunter2@host")]
    assert settings_of_run(words) == f"password={MASK} url=http://{MASK}@host"
