"""THE training loop: the same for every strategy, on every rank. Ray has no part in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.config.schema import Config
from orchestrator.events import CheckpointFailed, CheckpointSaved, ModelCut, Warned
from orchestrator.job import Job
from orchestrator.messages import Assignment, EvalPoint, Outcome
from orchestrator.rundir import RunDir
from orchestrator.strategies.base import StepResult, Strategy
from orchestrator.worker.checkpoint import load
from orchestrator.worker.checkpoint_writer import CheckpointWriter, WriteFailed
from orchestrator.worker.control import Outbox, StepGate
from orchestrator.worker.data import epoch_of, eval_batches, train_batches
from orchestrator.worker.metrics import NonFiniteError, Window
from orchestrator.worker.state import TrainState, nonfinite_parameter

GRAD_NORM_EVERY = 10
"""A logged point has the gradient norm at multiples of this, unless the step needs it anyway: the
pass over all gradients would be the dearest part of logging every step."""

PROFILED_STEPS = 10


@dataclass
class Position:
    """How far the run has come."""

    step: int = 0
    samples_consumed: int = 0


class Loop:
    """One rank's training, from the position it is given to the last step or a stop."""

    def __init__(
        self,
        *,
        assignment: Assignment,
        job: Job,
        strategy: Strategy,
        device: torch.device,
        gate: StepGate,
        outbox: Outbox,
    ):
        self.assignment = assignment
        self.config: Config = assignment.config
        self.job = job
        self.strategy = strategy
        self.device = device
        self.gate = gate
        self.outbox = outbox
        self.rank = assignment.global_rank
        self.mesh = assignment.plan.mesh
        self.position = Position()
        self.last_checkpoint: str | None = None
        self._stall_ms = 0.0
        self._writer = CheckpointWriter(
            RunDir(Path(assignment.run_dir)).checkpoints,
            keep=self.config.checkpoint.keep,
            run_uid=assignment.run_uid,
        )

    def run(self, startup: dict[str, float]) -> Outcome:
        """Train; ``startup`` receives the seconds of the parts up to the end of the first step."""
        began = time.perf_counter()
        self.outbox.at(0, "build")
        train_set = self.job.dataset("train")
        val_set = self.job.dataset("val")
        startup["dataset_s"] = -began + (began := time.perf_counter())
        self.strategy.setup(train_set)
        if self.rank == 0 and (stages := self.strategy.stage_summaries()):
            self.outbox.put_event(ModelCut(stages=stages))
        self.strategy.attach()
        self._resume()
        startup["model_s"] = -began + (began := time.perf_counter())
        first_step_at: float | None = None
        stopped = False
        train, position = self.config.train, self.position
        window = Window(
            device=self.device,
            total_steps=train.steps - position.step,
            first_step=position.step,
        )
        batches = train_batches(
            train_set,
            collate=self.job.collate,
            seed=self.config.seed,
            samples_consumed=position.samples_consumed,
            steps=train.steps - position.step,
            global_batch_size=train.global_batch_size,
            data_parallel_size=self.mesh.data_parallel_size,
            dp_rank=self.mesh.dp_rank(self.rank),
            grad_accumulation=train.grad_accumulation,
            num_workers=self.config.data.num_workers,
            pin_memory=self.device.type == "cuda",
            timeout_s=self.config.cluster.collective_timeout_s,
            read=self.strategy.reads_data,
        )
        with self._advising(), contextlib.closing(batches), self._profiler() as profiled:
            steps = iter(batches)
            self.outbox.at(position.step, "train")
            window.timer.restart()
            while position.step < train.steps:
                step = position.step + 1
                if not self.gate.begin(step):
                    stopped = True
                    break
                seed_step(self.config.seed, step, self.rank)
                waited = time.perf_counter()
                batch = next(steps)
                window.data_wait_s += time.perf_counter() - waited
                log_now = step % train.log_every == 0 or step in (1, train.steps)
                result = self.strategy.train_step(
                    batch, want_grad_norm=log_now and (step % GRAD_NORM_EVERY == 0 or step == 1)
                )
                window.add(step, result.loss_sum, result.weight, skipped=result.skipped)
                position.step = step
                position.samples_consumed += train.global_batch_size
                self.outbox.at(step, "train")
                profiled()
                if result.skipped and self.rank == 0:
                    self.outbox.put_event(Warned(message=f"step {step} skipped: gradient not finite"))
                if first_step_at is None:
                    first_step_at = time.time()
                    startup["first_step_s"] = time.perf_counter() - began
                if log_now:
                    self._log(window, result, len(train_set))  # type: ignore[arg-type]
                if train.eval_every and step % train.eval_every == 0 and step < train.steps:
                    self._evaluate(val_set)
                    window.timer.restart()
                if self._checkpoint_due():
                    window.check_finite()
                    self._checkpoint()
                    window.timer.restart()
        if not stopped:
            self._evaluate(val_set)
        final = None
        if position.step > 0:
            with self._advising():
                window.check_finite()
                final = self._checkpoint()
        self.outbox.at(position.step, "end")
        self._writer.drain(timeout_s=self.config.cluster.collective_timeout_s)
        self._report_written()
        return Outcome(
            status="stopped" if stopped else "done",
            step=position.step,
            first_step_at=first_step_at,
            startup=startup,
            checkpoint=self.last_checkpoint,
            text=None if stopped else self._sample(final),
        )

    def close(self) -> None:
        """End the background work, whatever happened; the process group may end after it."""
        self.strategy.close()
        self._writer.close(timeout_s=self.config.cluster.stop_grace_s)

    @contextlib.contextmanager
    def _advising(self) -> Iterator[None]:
        """Have an error about numbers that are not finite say what helps under this strategy."""
        try:
            yield
        except NonFiniteError as e:
            e.advice = self.strategy.nonfinite_advice or e.advice
            raise

    def _resume(self) -> None:
        """Rank 0 reads the checkpoint, the strategy brings it to the others."""
        if self.assignment.checkpoint is None:
            return
        state = load(Path(self.assignment.checkpoint)) if self.rank == 0 else None
        meta = self.strategy.restore(state, source=0)
        self.position.step = meta["step"]
        self.position.samples_consumed = meta["samples_consumed"]

    def _log(self, window: Window, result: StepResult, samples: int) -> None:
        consumed = self.position.samples_consumed
        self.outbox.put_point(
            window.close(
                samples_seen=consumed,
                epoch=epoch_of(consumed, samples),
                lr=self.strategy.lr,
                grad_norm=result.grad_norm,
                comm_ms=self.strategy.comm_ms(),
                spans=self.strategy.spans(),
                figures=self.strategy.figures(),
            )
        )
        self._report_written()

    def _evaluate(self, dataset: Any) -> None:
        """Every rank evaluates its part; the driver adds the parts up."""
        self.outbox.at(self.position.step, "eval")
        with self.strategy.together():
            self._evaluate_together(dataset)
        self.outbox.at(self.position.step, "train")

    def _evaluate_together(self, dataset: Any) -> None:
        loss_sum, weight = torch.zeros((), device=self.device), torch.zeros(())
        sums: dict[str, torch.Tensor] = {}
        for batch, valid in eval_batches(
            dataset,
            collate=self.job.collate,
            batch_size=self.strategy.eval_batch_size,
            data_parallel_size=self.mesh.data_parallel_size,
            dp_rank=self.mesh.dp_rank(self.rank),
            num_workers=self.config.data.num_workers,
            pin_memory=self.device.type == "cuda",
            timeout_s=self.config.cluster.collective_timeout_s,
            read=self.strategy.reads_data,
        ):
            if valid == 0:
                continue
            result = self.strategy.evaluate(batch, valid)
            loss_sum += result.loss_sum
            weight += result.weight.cpu()
            for name, value in result.metrics.items():
                sums[name] = sums[name] + value if name in sums else value
        self.outbox.put_point(
            EvalPoint(
                step=self.position.step,
                time=time.time(),
                loss_sum=float(loss_sum),
                weight=float(weight),
                sums={name: float(value) for name, value in sums.items()},
            )
        )

    def _checkpoint_due(self) -> bool:
        every, step = self.config.checkpoint.every, self.position.step
        return every > 0 and step % every == 0 and step < self.config.train.steps

    def _checkpoint(self) -> TrainState | None:
        """Returns what is being saved, on the rank that saves.

        Raises:
            NonFiniteError: there a parameter is not finite; nothing is saved.
        """
        self.outbox.at(self.position.step, "checkpoint")
        began = time.perf_counter()
        with self.strategy.together():
            state = self.strategy.capture(
                step=self.position.step,
                samples_consumed=self.position.samples_consumed,
                into=self._writer.buffers(),
            )
        if state is not None:
            # A gradient can be NaN where the loss is not, and its norm is not always known.
            if (name := nonfinite_parameter(state)) is not None:
                raise NonFiniteError(f"the parameter {name} is no longer finite", self.position.step)
            self._writer.submit(state, timeout_s=self.config.cluster.collective_timeout_s)
            self._stall_ms = (time.perf_counter() - began) * 1e3
        self.outbox.at(self.position.step, "train")
        return state

    def _report_written(self) -> None:
        for result in self._writer.results():
            if isinstance(result, WriteFailed):
                self.outbox.put_event(CheckpointFailed(step=result.step, reason=result.reason))
                continue
            self.last_checkpoint = str(result.path)
            self.outbox.put_event(
                CheckpointSaved(
                    step=result.step,
                    path=str(result.path),
                    seconds=result.seconds,
                    stall_ms=self._stall_ms,
                    size_bytes=result.size_bytes,
                )
            )

    def _sample(self, state: TrainState | None) -> str | None:
        """What the job shows of the trained model; one that lies in parts is built whole from what was saved."""
        model = self.strategy.full_model
        if model is None and state is not None and type(self.job).sample is not Job.sample:
            model = self.job.model()
            model.load_state_dict(state.model)
        if model is None:
            return None
        return self.job.sample(model, torch.Generator().manual_seed(self.config.seed))

    @contextlib.contextmanager
    def _profiler(self) -> Iterator[Callable[[], None]]:
        """With ``profile=true``, a trace of some steps after warm-up, for Perfetto or Chrome."""
        if not self.config.profile:
            yield lambda: None
            return
        folder = RunDir(Path(self.assignment.run_dir)).profile
        folder.mkdir(exist_ok=True)
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=5, warmup=2, active=PROFILED_STEPS, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"rank-{self.rank}.json")),
        ) as profiler:
            yield profiler.step


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout and the like a function of (seed, step, rank), so that a resume repeats it."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
