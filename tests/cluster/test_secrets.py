"""Secrets of every kind reach the training, and nothing that the run writes."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from helpers.machines import commands
from helpers.records.runs import in_campaign
from orchestrator import compare, doctor, evaluate, export, logs, plan, runs, schema, show, stop, submit, sync
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.origin import origin_of_submission
from orchestrator.features.submit.job_submission import make_submission
from orchestrator.features.submit.submitted import checked
from orchestrator.launch import main

PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0\nQEFAASCBKcwggSjAgEAAo\nXyz=\n-----END PRIVATE KEY-----\n"

SECRETS = {
    "default factory": "factory-Aa11Bb22",
    "another default factory": "wJalrXUtnFEMIK7MDENGbPx",
    "first line of a key": "MIIEvQIBADANBgkqhkiG9w0",
    "last line of a key": "QEFAASCBKcwggSjAgEAAo",
    "override": "overridden-Cc33",
    "quoted override": 'it\'s "quoted" \\ and $long;',
    "number": "8675309042",
    "four characters": "zq7k",
    "auth": "auth-Dd44/+=",
    "api_key": "api-Ee55",
    "path": "/vault/team-seven/Ff66",
    "item of a list": "hf-Gg77",
    "last item of a list": "hf-Hh88",
    "nested mapping": "nested-Ii99",
    "nested dataclass": "login-Jj00",
    "user of a URL": "ghp-Kk11Ll22",
    "environment": "forwarded-Mm33Nn44",
    "environment of the workers": "workers-Rr88Ss99",
    "tracking password": "tracking-Oo55",
    "tracking query": "query-Pp66",
    "tracking token": "mlflow-Qq77",
    "mapping in a list": "service-Tt11",
    "bearer": "bearer-Uu22vv",
    "below a secret mapping": "deep-Vv33",
    "list under a secret key": "listed-Ww44",
    "password of another URL": "database-Xx55",
    "query of a URL": "endpoint-Yy66",
    "word after an option": "word-Zz77",
    "text after an option": "option-Ab88",
    "assignment in a text": "assigned-Cd99",
}
"""Texts that must appear nowhere."""

SERVICES = (
    "{name:a,token:service-Tt11},{headers:{Authorization:'Bearer bearer-Uu22vv'}},{secret:{value:deep-Vv33}},"
    "{passwords:[listed-Ww44]}"
)
OVERRIDES = (
    "strategy=single", "cluster=local", "train.steps=12", "train.log_every=4", "name=planted", "job.hidden=8",
    "job._target_=helpers.jobs.secret_job.Secretive", "job.password=overridden-Cc33", "job.client_secret=8675309042",
    "job.passphrase='it\\'s \"quoted\" \\ and $long;'", "job.pwd=zq7k", "job.door_secret=7", "job.auth='auth-Dd44/+='",
    "job.api_key=api-Ee55", "job.credentials=/vault/team-seven/Ff66", "job.hf_tokens=[hf-Gg77,hf-Hh88]",
    "job.options={password:nested-Ii99,depth:3}", "job.login.password=login-Jj00",
    "job.data_url='https://ghp-Kk11Ll22@host/data'", f"job.services=[{SERVICES}]",
    "job.database='postgres://ada:database-Xx55@db/x'", "job.endpoint='https://host/x?api_key=endpoint-Yy66&page=1'",
    "job.command=[train,--hf-token,word-Zz77,--lr,x]",
    "job.setup='train --hf-token option-Ab88 PASSWORD=assigned-Cd99 host=h'",
    "cluster.env.PLANTED_WORKER_TOKEN=workers-Rr88Ss99",
)  # fmt: skip


def planted(folder: Path) -> Mapping[str, str]:
    """The secrets in the environment."""
    key_file = folder / "key.pem"
    key_file.write_text(PEM)
    return {
        "PLANTED_BY_FACTORY": SECRETS["default factory"],
        "PLANTED_BY_ANOTHER_FACTORY": SECRETS["another default factory"],
        "PLANTED_KEY_FILE": str(key_file),
        "PLANTED_ENVIRONMENT_TOKEN": SECRETS["environment"],
        "MLFLOW_TRACKING_TOKEN": SECRETS["tracking token"],
    }


def leaks(folder: Path, console: str) -> Iterator[str]:
    """Each secret in the output or below ``folder``, with its place."""
    places = {"the console": console.encode()}
    places |= {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    del places["key.pem"]
    for place, content in places.items():
        for kind, secret in SECRETS.items():
            forms = {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret)}
            if any(form.encode() in content for form in forms):
                yield f"{kind} in {place}"


def test_a_run_writes_none_of_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    quick = ("tracking.log_model=false", "tracking.log_dataset=false", "tracking.flush_timeout_s=100")
    done = commands.run(*OVERRIDES, uri, *quick, cwd=tmp_path, timeout_s=150, **planted(tmp_path))
    assert done.returncode == 0, done.stdout
    assert list(leaks(tmp_path, done.stdout)) == []
    (run_dir,) = (p.parent for p in tmp_path.glob("outputs/*/*/run.json"))
    assert list(tmp_path.glob("mlartifacts/*/*/artifacts/logs/rank-0.log"))

    values = [
        SECRETS["default factory"], SECRETS["another default factory"], PEM, SECRETS["override"],
        SECRETS["quoted override"], SECRETS["auth"], SECRETS["number"], SECRETS["four characters"], SECRETS["api_key"],
        SECRETS["path"], SECRETS["item of a list"], SECRETS["last item of a list"],
        "{'password': 'nested-Ii99', 'depth': 3}", SECRETS["nested dataclass"], "https://ghp-Kk11Ll22@host/data",
        SECRETS["environment"],
        "({'name': 'a', 'token': 'service-Tt11'}, {'headers': {'Authorization': 'Bearer bearer-Uu22vv'}}, "
        "{'secret': {'value': 'deep-Vv33'}}, {'passwords': ['listed-Ww44']})",
        "postgres://ada:database-Xx55@db/x", "https://host/x?api_key=endpoint-Yy66&page=1",
        "('train', '--hf-token', 'word-Zz77', '--lr', 'x')",
        "train --hf-token option-Ab88 PASSWORD=assigned-Cd99 host=h", SECRETS["environment of the workers"],
    ]  # fmt: skip
    fingerprint = hashlib.sha256("".join(values).encode()).hexdigest()
    assert f"fingerprint {fingerprint}" in (run_dir / "logs" / "rank-0.log").read_text()

    job = yaml.safe_load((run_dir / "config.yaml").read_text())["job"]
    assert job["door_secret"] == job["token"] == job["hf_tokens"] == job["login"]["password"] == "***"
    assert (job["options"]["depth"], job["login"]["user"], job["hidden"]) == (3, "anybody", 8)
    assert "door_secret=***" in json.loads((run_dir / "run.json").read_text())["command"]

    for verb in (logs, show, stop, sync):
        verb.main([str(run_dir)])
    runs.main(["--output-dir", str(run_dir.parents[1])])
    compare.main([str(run_dir), "--picture", str(tmp_path / "compared.png")])
    compare.main([str(run_dir), "--json"])
    monkeypatch.chdir(tmp_path)
    for name, value in planted(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert export.main([str(run_dir), "--to", str(tmp_path / "exported")]) == 2
    shown = "".join(capsys.readouterr())
    assert "fingerprint" in shown
    assert list(leaks(tmp_path, shown)) == []


@pytest.mark.campaign
def test_a_run_that_fails_writes_none_of_its_secrets(tmp_path: Path) -> None:
    uri = "tracking.uri='http://me:tracking-Oo55@127.0.0.1:9/?api_key=query-Pp66'"
    timeouts = [f"tracking.{key}=1" for key in ("request_timeout_s", "flush_timeout_s", "background_timeout_s")]
    overrides = (*OVERRIDES, "job.raises=true", uri, *timeouts)
    failed = commands.run(*overrides, cwd=tmp_path, timeout_s=150, **planted(tmp_path))
    assert failed.returncode == 1, failed.stdout
    assert "refused by the server: ***" in failed.stdout
    assert list(leaks(tmp_path, failed.stdout)) == []


LAUNCHES = {
    "plan": ["plan=true"],
    "sweep": ["-m", "plan=true", "job.hidden=8,9"],
    "help": ["--help"],
    "cfg": ["--cfg", "job"],
    "cfg all": ["--cfg", "all"],
    "cfg resolved": ["--cfg", "job", "--resolve"],
    "cfg of a section": ["--cfg", "job", "--package", "job"],
    "info": ["--info"],
    "unknown key": ["train.stepss=3", "job.api_keys=[api-Ee55]"],
    "unknown field": ["job.hiddenn=3"],
    "wrong type": ["plan=true", "job.services={token:service-Tt11}", "job.options=[{password:nested-Ii99}]"],
    "not parsed": ["plan=true", "job.services=[{token:service-Tt11]"],
}
"""What `launch` says without training, by place."""
VERBS: Mapping[str, tuple[Callable[[Sequence[str]], int], list[str]]] = {
    "schema": (schema.main, []),
    "schema of the job": (schema.main, ["job"]),
    "schema of the tracking": (schema.main, ["tracking"]),
    "schema with an error": (schema.main, ["train.stepss=3"]),
    "plan verb": (plan.main, ["--cluster", "1x2xH100"]),
    "plan verb as JSON": (plan.main, ["--cluster", "1x2xH100", "--json"]),
    "plan verb with an error": (plan.main, ["--cluster", "1x2xH100", "train.stepss=3"]),
    "doctor": (doctor.main, ["--json"]),
    "evaluate": (evaluate.main, ["nowhere"]),
}
PLACES = {**{name: (main, words) for name, words in LAUNCHES.items()}, **VERBS}
"""Everything that shows configuration without a run; what runs leave is looked through above."""


@pytest.mark.parametrize("place", [*(place for place in PLACES if place != "doctor"), *in_campaign("doctor")])
def test_other_output_has_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in planted(tmp_path).items():
        monkeypatch.setenv(name, value)
    uri = "tracking.uri='http://me:tracking-Oo55@127.0.0.1:9/?api_key=query-Pp66'"
    verb, words = PLACES[place]
    verb([*OVERRIDES, uri, *words])  # of two values of a key, the last one counts
    said = capsys.readouterr()
    assert said.out + said.err
    assert list(leaks(tmp_path, said.out + said.err)) == []
    if "JSON" in place or place in ("schema", "schema of the job"):
        json.loads(said.out)


def test_a_submission_shows_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of a job is what Ray runs, so that the dashboard shows it; submit warns of that."""
    monkeypatch.chdir(tmp_path)
    for name, value in planted(tmp_path).items():
        monkeypatch.setenv(name, value)
    uri = "tracking.uri='http://me:tracking-Oo55@127.0.0.1:9/?api_key=query-Pp66'"
    words = [word for word in OVERRIDES if word != "cluster=local"] + [uri]
    assert submit.main(["--address", "http://127.0.0.1:1", *words]) == 2
    shown = "".join(capsys.readouterr())
    assert "warning: Ray's dashboard shows the command of a job, with job.password, " in shown
    assert "checking ***" in shown
    redactor = Redactor.of_process()
    configs = checked(words, tmp_path, redactor, sweep=False)
    capsys.readouterr()
    address = "http://me:hunter-Qq77@head:8265"
    origin = origin_of_submission(
        words, given_address=address, address=address, working_dir=".", restarts=None, ray=["ray"]
    )
    job = make_submission(
        configs, words, working_dir=tmp_path, source=None, suffix="1", origin=origin, redactor=redactor
    )
    assert "hunter-Qq77" not in str(job.env)
    assert list(leaks(tmp_path, f"{shown} {job.metadata} {job.id} {job.env}")) == []
