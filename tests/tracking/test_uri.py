import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.config.redact import url_secrets
from orchestrator.features.tracking.uri import (
    absolute_uri,
    is_redacted,
    page_command,
    redact_uri,
    sqlite_path,
    sqlite_uri,
    uri_for_mlflow,
    validate_uri,
)


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///mlflow.db",
        "sqlite:////tmp/some/new/mlflow.db",
        "http://localhost:5000",
        "https://me:secret@host/mlflow",
        "postgresql://me:secret@host/db",
        "postgresql+psycopg2:///db",
        "mysql+pymysql://host/db",
        "mssql+pyodbc://host/db?driver=x",
        "databricks",
        "databricks://profile",
    ],
)
def test_valid(uri, tmp_path):
    assert validate_uri(uri, base=tmp_path) is None


def test_errors_name_the_key_and_the_remedy(golden, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    golden.answers("errors/tracking-uri", lambda uri: validate_uri(uri, base=tmp_path).replace(str(tmp_path), "/base"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_database_where_nothing_can_be_written(tmp_path):
    tmp_path.chmod(0o500)
    assert "is not writable" in str(validate_uri("sqlite:///mlflow.db", base=tmp_path))


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        ("sqlite:///mlflow.db", "sqlite:////base/mlflow.db"),
        ("sqlite:///a/b.db?timeout=5", "sqlite:////base/a/b.db?timeout=5"),
        ("sqlite:////tmp/mlflow.db", "sqlite:////tmp/mlflow.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("http://host:5000", "http://host:5000"),
    ],
)
def test_relative_sqlite_paths_become_absolute(uri, absolute):
    assert absolute_uri(uri, Path("/base")) == absolute


@pytest.mark.parametrize("folder", ["a%20b", "a?b#c", "größe 猫", b"b\xffse"])
def test_a_database_may_be_in_a_folder_of_any_name(folder, tmp_path):
    path = tmp_path / os.fsdecode(folder)
    path.mkdir()
    uri = absolute_uri("sqlite:///mlflow.db?timeout=5", path)
    assert uri.isprintable()
    assert sqlite_path(uri) == sqlite_path(sqlite_uri(path / "mlflow.db")) == path / "mlflow.db"
    scheme, _, opened = uri_for_mlflow(uri).partition(":///")
    assert scheme == "sqlite"
    assert opened.endswith("/mlflow.db?timeout=5")
    assert Path(opened).parent.samefile(path)


@pytest.mark.parametrize("folder", ["plain", "it's (a) $HOME", "a%20b?"])
def test_the_command_that_serves_the_page_is_for_a_shell(folder, tmp_path):
    path = tmp_path / folder
    path.mkdir()
    command = page_command(absolute_uri("sqlite:///mlflow.db", path))
    shown = subprocess.check_output(["sh", "-c", f'mlflow() {{ cd "$PWD"; pwd; echo "$3"; }}; {command}'], text=True)
    where, uri = shown.splitlines()
    assert sqlite_path(absolute_uri(uri, Path(where))) == path / "mlflow.db"


def test_passwords_are_masked_and_known():
    uri = "postgresql://me:hunter%402@host/db?sslpassword=open-sesame&x=1"
    shown = redact_uri(uri)
    assert is_redacted(shown)
    assert shown.endswith("@host/db?sslpassword=***&x=1")
    assert "hunter" not in shown
    assert set(url_secrets(uri)) == {"hunter%402", "hunter@2", "open-sesame"}
    assert sqlite_path(uri) is None
