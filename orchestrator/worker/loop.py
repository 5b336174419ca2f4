"""THE training loop: the same for every strategy, on every rank. Ray has no part in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.protocol.events import CheckpointFailed, CheckpointSaved, FirstStepDone, ModelCut, Warned
from orchestrator.protocol.messages import Assignment, EvalPoint, Outcome, Phase
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import load
from orchestrator.state.checkpoint_writer import CheckpointWriter, WriteFailed
from orchestrator.state.fence import Fence
from orchestrator.state.train_state import TrainState, nonfinite_parameter
from orchestrator.strategies.base import Context, StepResult, Strategy
from orchestrator.worker import fault_injection as faults
from orchestrator.worker.control import Outbox, StepGate
from orchestrator.worker.data import epoch_of, eval_batches, train_batches
from orchestrator.worker.metrics import NonFiniteError, Window

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
        self.config: Config = assignment.config
        self.job = job
        self.strategy = strategy
        self.device = device
        self.gate = gate
        self.outbox = outbox
        self.position = Position()
        self._run_dir = RunDir(Path(assignment.run_dir))
        self._fence = Fence(self._run_dir.fence_file)
        self.place(assignment)
        self._data: tuple[Dataset[Any], Dataset[Any]] | None = None
        self._has_state = False
        self._stall_ms = 0.0
        self._writer = CheckpointWriter(
            self._run_dir.checkpoints,
            keep=self.config.checkpoint.keep,
            run_uid=assignment.run_uid,
            fence=self._fence,
        )

    def place(self, assignment: Assignment) -> None:
        """Take a place in a generation, that of before or another one."""
        self.assignment = assignment
        self._fence.token = assignment.fence
        self.rank = assignment.global_rank
        self.mesh = assignment.plan.mesh
        self.strategy.reassign(context_of(assignment, self.device))

    def run(self, startup: dict[str, float]) -> Outcome:
        """This rank's part in the generation that it has its place in, whose group has been formed.

        The first time model and data are made; later they are as the generation before has left them. ``startup``
        receives the seconds of the parts up to the end of the first step.
        """
        began = time.perf_counter()
        assignment = self.assignment
        self._at("build")
        if self._data is None:
            self._data = self.job.dataset("train"), self.job.dataset("val")
            startup["dataset_s"] = -began + (began := time.perf_counter())
            self.strategy.setup(self._data[0])
        self.strategy.attach()
        if self.rank == 0 and assignment.generation == 1 and (stages := self.strategy.stage_summaries()):
            self.outbox.put_event(ModelCut(stages=stages))
        self._restore_state()
        self._has_state = True
        startup["model_s"] = time.perf_counter() - began
        with self._advising():
            stopped = self._train(startup)
            if not stopped:
                self._evaluate()
            passes_state_on = stopped and not self.gate.saves and self.recoverable_steps(update_complete=True)
            final = self._checkpoint() if self.position.step > 0 and not passes_state_on else None
        self._at("end")
        self._writer.drain(timeout_s=self.config.cluster.collective_timeout_s)
        self._report_written()
        return Outcome(
            status="stopped" if stopped else "done",
            step=self.position.step,
            text=None if stopped else self._sample(final),
            recoverable_steps=self.recoverable_steps(update_complete=True),
        )

    def recoverable_steps(self, *, update_complete: bool) -> Mapping[int, tuple[int, ...]]:
        """As :meth:`Strategy.held`; nothing before the model has the state that the run begins with."""
        update_complete = update_complete or self.device.type == "cpu"
        return (
            self.strategy.recoverable_steps(self.position.step, update_complete=update_complete)
            if self._has_state
            else {}
        )

    def finish(self, timeout_s: float) -> None:
        """End the background work."""
        self._writer.close(timeout_s=timeout_s)
        self._report_written()

    @contextlib.contextmanager
    def _advising(self) -> Iterator[None]:
        """Have an error about numbers that are not finite say what helps under this strategy."""
        try:
            yield
        except NonFiniteError as e:
            e.advice = self.strategy.nonfinite_advice or e.advice
            raise

    def _train(self, startup: dict[str, float]) -> bool:
        """Step by step to the last one; True: the driver has stopped it before."""
        began = time.perf_counter()
        assert self._data is not None
        train, position, train_set = self.config.train, self.position, self._data[0]
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
        first = True
        with contextlib.closing(batches), self._profiler() as profiled:
            steps = iter(batches)
            self._at("train")
            window.timer.restart()
            while position.step < train.steps:
                step = position.step + 1
                if not self.gate.begin(step, self.assignment.generation):
                    window.check_finite()
                    return True
                seed_step(self.config.seed, step, self.rank)
                waited = time.perf_counter()
                batch = next(steps)
                window.data_wait_s += time.perf_counter() - waited
                self._inject_fault("train", step)
                log_now = step % train.log_every == 0 or step in (1, train.steps)
                result = self.strategy.train_step(
                    batch, want_grad_norm=log_now and (step % GRAD_NORM_EVERY == 0 or step == 1)
                )
                window.add(step, result.loss_sum, result.weight, skipped=result.skipped)
                position.step = step
                position.samples_consumed += train.global_batch_size
                self._at("train")
                self.outbox.tick()
                self.strategy.after_step(step=step, samples_consumed=position.samples_consumed)
                profiled()
                if result.skipped and self.rank == 0:
                    self.outbox.put_event(Warned(message=f"step {step} skipped: gradient not finite"))
                if first:
                    startup["first_step_s"] = time.perf_counter() - began
                    self.outbox.put_event(FirstStepDone(generation=self.assignment.generation, startup=startup))
                first = False
                if log_now:
                    self._log(window, result, len(train_set))  # type: ignore[arg-type]
                if self._evaluation_due() or self._checkpoint_due():
                    window.check_finite()
                    self._run_due_tasks()
                    window.timer.restart()
        window.check_finite()
        return False

    def _run_due_tasks(self) -> None:
        """Between two steps: what is due after the last one."""
        if self._evaluation_due():
            self._evaluate()
        if self._checkpoint_due():
            self._checkpoint()

    def _restore_state(self) -> None:
        """Bring every rank to one state: that of the most advanced survivor, the checkpoint's, or the first."""
        assignment, position = self.assignment, self.position
        if assignment.sources is not None:
            meta = self.strategy.recover_state(
                assignment.sources,
                source_step=assignment.source_step,
                step=position.step,
                samples_consumed=position.samples_consumed,
            )
        elif assignment.checkpoint is not None:
            state = load(Path(assignment.checkpoint)) if self.rank == 0 else None
            meta = self.strategy.restore(state, source=0)
        else:
            self.strategy.sync_initial_state()
            return
        position.step, position.samples_consumed = meta["step"], meta["samples_consumed"]
        if assignment.sources is not None:
            self._run_due_tasks()  # which the failure may have cut short

    def _at(self, phase: Phase) -> None:
        self.outbox.at(self.position.step, phase)
        if phase != "train":
            self._inject_fault(phase, self.position.step)

    def _inject_fault(self, phase: str, step: int) -> None:
        faults.inject_fault(self.assignment.faults, rank=self.rank, phase=phase, step=step)

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
                metrics=self.strategy.metrics(),
            )
        )
        self._report_written()

    def _evaluate(self) -> None:
        """Every rank evaluates its part; the driver adds the parts up."""
        assert self._data is not None
        self._at("eval")
        with self.strategy.quiesced():
            self._evaluate_quiesced(self._data[1])
        self._at("train")

    def _evaluate_quiesced(self, dataset: Any) -> None:
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
            self.gate.check(self.assignment.generation)
            self.outbox.tick()
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

    def _evaluation_due(self) -> bool:
        return self._is_due(self.config.train.eval_every)

    def _checkpoint_due(self) -> bool:
        return self._is_due(self.config.checkpoint.every)

    def _is_due(self, every: int) -> bool:
        step = self.position.step
        return every > 0 and step % every == 0 and 0 < step < self.config.train.steps

    def _checkpoint(self) -> TrainState | None:
        """Returns what is being saved, on the rank that saves.

        Raises:
            NonFiniteError: there a parameter is not finite; nothing is saved.
        """
        self._at("checkpoint")
        began = time.perf_counter()
        with self.strategy.quiesced():
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
        self._at("train")
        return state

    def _report_written(self) -> None:
        for result in self._writer.results():
            if isinstance(result, WriteFailed):
                self.outbox.put_event(CheckpointFailed(step=result.step, reason=result.reason))
                continue
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
        folder = self._run_dir.profile
        folder.mkdir(exist_ok=True)
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=5, warmup=2, active=PROFILED_STEPS, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"rank-{self.rank}.json")),
        ) as profiler:
            yield profiler.step


def context_of(assignment: Assignment, device: torch.device) -> Context:
    """What a strategy is told of its place in a generation."""
    config, plan = assignment.config, assignment.plan
    return Context(
        mesh=plan.mesh,
        global_rank=assignment.global_rank,
        device=device,
        seed=config.seed,
        train=config.train,
        options=config.strategy,
        pipeline=plan.pipeline,
        num_devices=plan.devices_per_worker,
        peer_copy_every=config.recovery.peer_copy_every,
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout and the like a function of (seed, step, rank), so that a resume repeats it."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
