"""Odd words, options and files for every verb: it answers with a sentence and one of its exit codes, in time."""

import contextlib
import dataclasses
import importlib
import io
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest

from orchestrator import cli, launch
from orchestrator.cli import VERBS
from orchestrator.config.schema import Config
from orchestrator.torchrun import torchrun_overrides

pytestmark = pytest.mark.slow

TABLE = next(Path(cli.__file__).parent.glob("features/*/*/published_runs.csv"), None)
SHORT, LONG = 5, 1000
"""The inputs of a verb in CI, and in the campaign."""
LIMIT_S = 120.0
"""For one input, on a machine that is busy with others."""

VALUES = (
    *("", " ", "null", "true", "nan", "inf", "-inf", "-1", "0", "1", "2.5", "1e400", "1_0", "0x10", "9" * 5000),
    *("[", "]", "[1,2]", "[[1],[2]]", "{a:", "{a:1}", "{a:{b:[c]}}", "a,b", "1,2", "range(1,3)", "glob(*)", "choice("),
    *("choice(1,2)", "sort(3,1)", "int(x)", "${", "${train.steps}", "${nowhere}", "${oc.env:NOWHERE}", "${a.b:c}"),
    *(
        "???",
        "***",
        "~",
        "-",
        "--",
        "=",
        "a=b",
        "'",
        '"',
        "'a",
        "\\",
        "a b",
        "\n",
        "\t",
        "é",
        "💥",
        "\udcff",
        "x" * 3000,
    ),
    *("..", "/", "/dev/null", ".", "nowhere", "nowhere.yaml", "digits", "toy", "gpt", "ddp", "mesh", "single"),
    *("json", "os.path", "jobs.toy.Toy", "jobs.nowhere.Job", "a.b.c.", ".", "torch.nn.Linear", "__main__.X"),
)
CONTENTS = (
    *(b"", b"5", b"null", b"[]", b"{}", b"- a", b"a: 1", b"a: [", b"\xff\xfe", b"\x00"),
    *(b"gr\xfc\xdfe: 1", b"a: &a [*a]"),
    *(b"defaults: null", b"defaults: ddp", b"defaults: [nowhere]", b"defaults: [{strategy: [a]}]", b"defaults: [5]"),
    *(b"defaults: [odd]", b"defaults: [{a: 1, b: 2}]", b"# @package _global_\ndefaults: [config, odd]\n", b"[" * 3000),
    *(b"{" * 3000, b"# @package _global_\ntrain: 5\n", b"# @package job\n_target_: 5\n", b"train: {steps: .inf}"),
    *(b"name: ddp\n", b'{"state": 5}', b'{"plan": []}', b'"text"', b"9" * 5000, b"a: !!python/object:os.system {}"),
    *(
        b"devices: {Z: 5}\n",
        b"devices: 5\n",
        b"links: {NDR: {gb_s: nan, source: x}}\n",
        b"a,b\n1,2\n",
        bytes(range(256)),
    ),
)
FILES = ("odd.yaml", "strategy/odd.yaml", "job/odd.yaml", "experiment/odd.yaml", "odd.csv", "odd.json", "odd.txt")
RUN_FILES = (
    *("run.json", "config.yaml", "events.jsonl", "metrics.jsonl"),
    *("logs/rank-0.log", "checkpoints/step-1/manifest.json"),
)
RUN = "outputs/2026-05-01/12-30-01-odd"


class Draw(random.Random):
    """Draws words."""

    def one(self, *choices: str) -> str:
        return self.choice(choices)

    def value(self) -> str:
        return self.choice((*VALUES, *FILES, str(self.randint(-9, 99))))

    def key(self) -> str:
        sections = [field.name for field in dataclasses.fields(Config)]
        known = ("train.steps", "train.global_batch_size", "train.precision", "strategy.num_workers", "strategy.shard")
        others = (
            *("job.hidden", "job.x", "job._target_", "a", "", "hydra.run.dir", "strategy.name"),
            *("callbacks", "data.x"),
        )
        prefix = self.choice(("", "", "", "", "+", "++", "~"))
        return prefix + self.choice((*known, *others, *sections))

    def override(self) -> str:
        return self.choice((f"{self.key()}={self.value()}", f"{self.key()}={self.value()}", self.value(), self.key()))

    def some(self, draw: Callable[[], str], most: int = 3) -> list[str]:
        return [draw() for _ in range(self.randint(0, most))]

    def given(self, *options: str, share: float = 0.3) -> list[str]:
        return [word for option in options if self.random() < share for word in (option, self.value())]


def files_of(draw: Draw, *, named: bool = True) -> list[str]:
    """Options that choose files of the configuration."""
    return [*(["--config-dir", "."] if draw.random() < 0.6 else []), *(draw.given("--config-name") if named else [])]


def run_words(draw: Draw) -> list[str]:
    return [draw.one(RUN, RUN, "last", "12-30-01-odd", draw.value()), *draw.given("--output-dir")]


def launched(draw: Draw) -> list[str]:
    shown = draw.choice((["--cfg", "job"], ["--cfg", "all"], ["--help"], ["--info"], ["--cfg", "job", "--resolve"]))
    package = ["--package", draw.value()] if shown[0] == "--cfg" and draw.random() < 0.2 else []
    return [*files_of(draw), *draw.some(draw.override), *shown, *package]


def planned(draw: Draw) -> list[str]:
    if draw.random() < 0.2:
        return ["--published", draw.value(), *draw.given("--devices", "--rows")]
    cluster = f"{draw.one('1', '2', '3', '12')}x{draw.one('1', '2', '5', '8')}x{draw.one('H100', 'A100', 'RTX4090')}"
    odd = f"{draw.one('1', draw.value())}x{draw.one('2', draw.value())}x{draw.one('H100', draw.value())}"
    options = ("--link", "--devices", "--tokens", "--price", "--failure-hours", "--rows", "--measured", "--picture")
    return [
        *("--cluster", draw.one(cluster, cluster, cluster, odd), "job=toy", "train.global_batch_size=16"),
        *draw.given(*options, share=0.07),
        *draw.some(draw.override, 1),
    ]


def torchrun(arguments: Sequence[str]) -> int:
    """What the verb does, but for the launch, which shows the configuration."""
    try:
        overrides, _ = torchrun_overrides(arguments)
    except ValueError as e:
        print(e)
        return 2
    return launch.main([*overrides, "--cfg", "job"])


def torchrun_words(draw: Draw) -> list[str]:
    options = draw.given("--nproc-per-node", "--nnodes", "--max-restarts", "--rdzv-conf", "-r")
    between = draw.choice(([], [], ["--"], ["-m"], ["--no-python"]))
    return [*options, *between, *draw.some(draw.override, 1), *draw.choice(([], ["train.py"])), *draw.some(draw.value)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd:
    """The odd words of a verb, and the exit codes that it may return for them."""

    words: Callable[[Draw], list[str]]
    codes: frozenset[int] = frozenset({0, 2})
    run: Callable[[Sequence[str]], int] | None = None
    share: float = 1.0
    """Of the inputs that it gets: for those that take seconds each."""


OTHERS = frozenset({0, 1, 2})
INPUTS = {
    "launch": Odd(words=launched),
    "torchrun": Odd(words=torchrun_words, run=torchrun),
    "new": Odd(words=lambda draw: draw.some(draw.value, 2)),
    "plan": Odd(words=planned, codes=OTHERS),
    "batch-size": Odd(words=lambda draw: [*draw.given("--steps", "--largest"), "train.stepss=1"]),
    "submit": Odd(
        words=lambda draw: ["--address", "http://127.0.0.1:1", *files_of(draw), *draw.some(draw.override), "a=1"],
        share=0.3,
    ),
    "stop": Odd(words=lambda draw: [*run_words(draw), *draw.given("--wait")], codes=OTHERS),
    "queue": Odd(
        words=lambda draw: [*draw.some(draw.value, 2), *draw.choice((["cancel"], ["priority", "x"], ["odd"])), "--x"]
    ),
    "logs": Odd(words=lambda draw: [*run_words(draw), *draw.given("--rank", "--tail")]),
    "runs": Odd(words=lambda draw: draw.given("--output-dir", "--last", "--state")),
    "show": Odd(words=run_words),
    "evaluate": Odd(words=lambda draw: [*run_words(draw), *draw.given("--split", "--data"), *draw.some(draw.override)]),
    "export": Odd(words=lambda draw: [*run_words(draw), *draw.given("--format", "--to")]),
    "tokenize": Odd(
        words=lambda draw: [
            *draw.some(draw.value),
            *("--tokenizer", draw.value(), "--to", draw.one("new.npy", "new.bin", "new", draw.value())),
            *draw.given("--field", "--end", "--damaged", "--workers"),
        ]
    ),
    "doctor": Odd(words=lambda draw: [*draw.some(draw.override), "train.stepss=1"], share=0.3),
    "schema": Odd(words=lambda draw: [*files_of(draw), *draw.some(draw.override, 2), *draw.some(draw.value, 1)]),
    "compare": Odd(
        words=lambda draw: [*draw.some(lambda: draw.one(RUN, draw.value())), "--no-picture", *draw.given("--last")],
        codes=OTHERS,
    ),
    "sync": Odd(words=lambda draw: ["nowhere" + draw.value(), *draw.given("--uri")], codes=OTHERS),
}


class TooLongError(Exception):
    """A verb does not end."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def write_files(draw: Draw, folder: Path) -> None:
    """Write odd files: those of a configuration, and those of a run."""
    rows = TABLE.read_bytes().splitlines()[:3] if TABLE else [b"gpu,gpus,mbs", b"H100,64,2"]
    damaged = b"\n".join([rows[0], rows[1].replace(b",64,", f",{draw.value()},".encode(errors="replace"))])
    for name in (*FILES, *(f"{RUN}/{name}" for name in RUN_FILES)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.choice((*CONTENTS, damaged, b"\n".join(rows), b'{"state": "finished"}')))


def outcome(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> tuple[object, str]:
    """The exit code, or what was raised, and the text; the streams encode as those of a terminal do."""
    text = io.BytesIO()
    out = io.TextIOWrapper(text, encoding="utf-8", write_through=True)
    error = io.TextIOWrapper(text, encoding="utf-8", errors="backslashreplace", write_through=True)
    code: object
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), bounded():
        try:
            code = run(words)
        except SystemExit as e:
            code = e.code
        except BaseException as e:  # all of which are faults
            code = repr(e)
    return code, text.getvalue().decode(errors="replace")


def test_every_verb_has_odd_input() -> None:
    assert INPUTS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", INPUTS)
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, SHORT), pytest.param(SHORT, LONG, marks=[pytest.mark.campaign, pytest.mark.timeout(7200)])],
    ids=["few", "many"],
)
def test_odd_input_is_answered_with_a_sentence(
    verb: str, first: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    odd = INPUTS[verb]
    run = odd.run or importlib.import_module(VERBS[verb].module).main
    faults = []
    for seed in range(first, first + max(SHORT, int(count * odd.share))):
        draw = Draw(seed)
        write_files(draw, tmp_path)
        words = [word for word in odd.words(draw) if "\0" not in word]
        code, text = outcome(run, words)
        if code not in odd.codes or "Traceback (most recent" in text:
            faults.append(f"seed {seed}: {code}: {words!r:.300}: {text[-300:]}")
    assert faults == []
