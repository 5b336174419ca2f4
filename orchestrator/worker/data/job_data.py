"""The data of the job as one rank reads it: its share of every batch, from any position of the run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from orchestrator.compat.streams import divides_by_rank
from orchestrator.config.eval_splits import TRAIN, VAL
from orchestrator.job import Job
from orchestrator.protocol.messages import Assignment
from orchestrator.protocol.metrics import Metric
from orchestrator.state.transport import broadcast_json, gather_json
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.data.datasets import (
    SAMPLES,
    STREAM,
    DatasetError,
    is_stream,
    known_length,
    needs_feeder,
    opened_dataset,
    samples_per_epoch,
    size_error,
)
from orchestrator.strategies.data.prefetch import SideStream, prefetched
from orchestrator.user_code.steering import changes_of
from orchestrator.worker.control.control import Outbox, StepGate, Warner
from orchestrator.worker.data.batches import EvalBatches, Sampling, Share, train_batches
from orchestrator.worker.data.data_loader import Loading
from orchestrator.worker.data.fed import Fed, Feeding, Reader, feeding
from orchestrator.worker.data.opened import batches_of, datasets_of, no_validation_warning
from orchestrator.worker.data.stream import Mark, StreamReader, read_past

_NUMBERS = re.compile(r"[\d,]+")


class JobData:
    """Opens the batches of this rank. It outlives a generation: a stream is read on by the same reader if it can be.

    Attributes:
        datasets: the data of the job.
        samples_per_epoch: None if it is not known.
    """

    def __init__(
        self,
        job: Job,
        assignment: Assignment,
        *,
        strategy: Strategy,
        device: torch.device,
        gate: StepGate,
        outbox: Outbox,
        warner: Warner,
    ):
        self._assignment = assignment
        self._feeding: Feeding | None = None
        self._warner = warner
        self._job = job
        config = assignment.config
        self.datasets = datasets_of(job, config.train.eval_splits, config.seed, opened=self._opened)
        self._strategy = strategy
        self._device = device
        self._gate = gate
        self._outbox = outbox
        self._reader: Reader | None = None
        self._mark: Mark | None = None
        self._eval_batches: dict[str, EvalBatches] = {}
        self._first_reads: dict[str, tuple[int, str]] = {}  # of splits that are evaluated
        self._changes = 0  # of the fields of the job, when those batches were opened
        train = assignment.config.train
        if VAL in train.eval_splits and VAL not in self.datasets.evaluated and assignment.generation == 1:
            warning = no_validation_warning(train.eval_every, samples=job.draws_samples)
            warner.warn(warning, topic="no validation")
        self.reassign(assignment)

    def reassign(self, assignment: Assignment) -> None:
        """Read the share of the rank of ``assignment``."""
        self._assignment = assignment
        if self._feeding is not None:
            self._feeding.reassign(assignment)
        batch_size = assignment.config.train.global_batch_size
        self._batches = batches_of(self._job, self.datasets, batch_size)
        if self._job.carried and self._batches is None and not is_stream(self.datasets.train):
            raise DatasetError(
                f"Job.carried: row i of {', '.join(self._job.carried)} belongs to row i of every batch, and samples "
                "are read in random order; define Job.batch_sampler, or return a stream from job.dataset('train')"
            )
        self.samples_per_epoch = samples_per_epoch(self._job, self.datasets.train, assignment.config.train)

    def sample_source(self) -> Any:
        """Return the training set, or another one if that is a stream, which may count its iterators."""
        train = self.datasets.train
        return self._opened(self._job, "train", self._assignment.config.seed) if is_stream(train) else train

    def _opened(self, job: Job, split: str, seed: int) -> Any:
        """Return the data of a split: what the job returns, or what another process reads for this rank."""
        if self._assignment.config.data.read == "rank":
            dataset = opened_dataset(job, split, seed)
            library = divides_by_rank(dataset) if is_stream(dataset) else None
            if library is not None and self._assignment.plan.world_size > 1:
                raise DatasetError(
                    f"job.dataset({split!r}): {library} gives each rank samples of its own, of which the rank would "
                    "keep only a share; set data.read=run, so that one process reads all of them for all ranks"
                )
            if not needs_feeder(dataset):
                return dataset
        if self._feeding is None:
            self._feeding = feeding(self._assignment, job, lambda text: self._warner.warn(text, topic=text))
        fed = self._feeding.open(split)
        if fed is None and split == "train":
            raise DatasetError(
                f"data.read={self._assignment.config.data.read}: job.dataset('train') returns a map-style dataset, of "
                "which each rank reads its own share; leave data.read out, or return a stream"
            )
        return opened_dataset(job, split, seed) if fed is None else fed

    def train_batches(self, *, samples_consumed: int, steps: int) -> Generator[list[Any], None, None]:
        """Return the micro-batches of each of the next ``steps`` steps, as :func:`worker.data.train_batches` does.

        Those of loader processes are on the GPU already, if there is one.

        Args:
            samples_consumed: the position in the sequence of samples: global samples since the beginning of the run.
        """
        size = self._assignment.config.train.global_batch_size
        end = samples_consumed + steps * size
        while samples_consumed < end:
            changes = changes_of(self._job)
            steps = (end - samples_consumed) // size
            with contextlib.closing(self._open_train_batches(samples_consumed, steps)) as batches:
                for batch in batches:
                    yield batch
                    samples_consumed += size
                    if changes_of(self._job) != changes:
                        break  # what was read ahead, and loader processes, have the fields from before
                else:
                    return

    def _open_train_batches(self, samples_consumed: int, steps: int) -> Generator[list[Any], None, None]:
        config, mesh = self._assignment.config, self._assignment.plan.mesh
        streamed = is_stream(self.datasets.train)
        batches = train_batches(
            self._reader_at(samples_consumed) if streamed else self.datasets.train,
            self._sampling,
            Share(
                global_batch_size=config.train.global_batch_size,
                data_parallel_size=mesh.data_parallel_size,
                dp_rank=mesh.dp_rank(self._assignment.global_rank),
                grad_accumulation=config.train.grad_accumulation,
            ),
            self._loading(self._assignment.plan.loader_processes),
            samples_consumed=samples_consumed,
            steps=steps,
            read=self._strategy.traits.reads_data,
        )
        self._outbox.begin_loader()
        return self._copied_ahead(batches) if self._assignment.plan.loader_processes else batches

    def eval_batches(self, split: str) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a ``split``, as :class:`worker.data.EvalBatches` does, on the GPU if there is one.

        Raises:
            CutOff: the ranks stop before the next batch.
            AbandonedError: the generation has ended.
        """
        if (changes := changes_of(self._job)) != self._changes:
            self._changes = changes
            self.close()  # loader processes have the fields from before
        if split not in self._eval_batches:
            loading = self._loading(self._assignment.plan.loader_processes)
            self._eval_batches[split] = self._open_eval_batches(split, self.datasets.evaluated[split], loading)
        opened = self._eval_batches[split]
        with self._outbox.evaluating(opened.num_batches):
            yield from self._checked(iter(opened))

    def trial_batches(self, split: str) -> Iterator[tuple[Any, int]]:
        """Yield the first batch of a ``split`` and the last one, as :meth:`eval_batches` does.

        Another iterator of a stream, and another loader process, so that later evaluations read what they would.
        """
        dataset = self.datasets.evaluated[split]
        if is_stream(dataset):
            dataset = self._opened(self._job, split, self._assignment.config.seed)
        loading = self._loading(min(1, self._assignment.plan.loader_processes))
        with contextlib.closing(self._open_eval_batches(split, dataset, loading)) as batches:
            yield from self._checked(batches.ends())
            if batches.first_read is not None:
                self._first_reads[split] = batches.first_read

    def _checked(self, batches: Generator[Any, None, None]) -> Iterator[tuple[Any, int]]:
        """Yield ``batches``, on the GPU if there is one, as long as the generation goes on."""
        self._outbox.begin_loader()
        with contextlib.closing(self._copied_ahead(batches)) as copied:
            for batch in copied:
                self._gate.begin_batch(self._assignment.generation)
                self._outbox.tick()
                yield batch

    def close(self) -> None:
        """End the loader processes of evaluations, which stay from one evaluation to the next of a generation."""
        for batches in self._eval_batches.values():
            batches.close()
        self._eval_batches = {}

    def metrics(self) -> Mapping[str, Metric]:
        """Return what is measured where the data is read."""
        return {} if self._reader is None else self._reader.metrics()

    def metadata(self, samples_consumed: int) -> dict[str, Any]:
        """Return the metadata of a checkpoint at this position: the size of the data, and where a stream can be read
        from, as far as they are known.
        """
        mark = None if self._reader is None else self._reader.bookmark(samples_consumed)
        values = None if mark is None else mark.to_json()
        if mark is not None and values is None:
            self._warner.warn(
                "train data: state_dict() of the stream is not plain JSON of at most 1 MiB, so checkpoints cannot keep "
                "it; a resumed run reads the stream from its first sample",
                topic="stream state",
            )
        known = {SAMPLES: known_length(self.datasets.train), STREAM: values}
        return {key: value for key, value in known.items() if value is not None}

    def restore(self, metadata: Mapping[str, Any], *, is_own: bool) -> None:
        """Continue from the metadata of a checkpoint, which may have been saved without :meth:`metadata`.

        Args:
            metadata: of the checkpoint.
            is_own: whether it is a checkpoint of this run, which reads the same data to its end.

        Raises:
            DatasetError: the training set has another size now, so that samples would be repeated or left out. A stream
                with a saved position is read on from there.
        """
        step, checkpoint = metadata["step"], self._assignment.checkpoint
        if is_own and (error := size_error(self.datasets.train, metadata, step=step, checkpoint=checkpoint)):
            raise DatasetError(error)
        if (values := metadata.get(STREAM)) is not None:
            self._mark = Mark.from_json(values)

    def check_equal(self, *, confirm: Callable[[], None]) -> None:
        """Check that the training sets of all ranks have one size. A collective operation.

        ``confirm`` is called before what others have sent is used.

        Raises:
            DatasetError: they have not.
        """
        own, world_size = known_length(self.datasets.train), self._assignment.plan.world_size
        sizes = gather_json(own, world_size=world_size, device=self._device)
        confirm()
        if (other := next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)) is not None:
            raise DatasetError(
                f"job.dataset('train') has {sizes[0]} samples on rank 0 and {sizes[other]} on rank {other}; let every "
                "worker read the same data, for example from a directory that all nodes share"
            )

    def check_order(self, *, confirm: Callable[[], None]) -> None:
        """Warn if ranks have read other samples of a stream at the same position. A collective operation.

        Each keeps its own share of what it reads, so that some samples would be trained on twice, and others never.
        ``confirm`` is called before what others have sent is used.
        """
        plan, first = self._assignment.plan, None if self._reader is None else self._reader.first_read()
        own = {**self._first_reads, **({} if first is None else {TRAIN: first})}
        found = gather_json(own, world_size=plan.world_size, device=self._device)
        confirm()
        for split in sorted({split for reads in found for split in reads}):
            of_ranks = [(rank, *reads[split]) for rank, reads in enumerate(found) if split in reads]
            (first_rank, position, read), *others = of_ranks
            if (other := next((n for n, at, digest in others if at == position and digest != read), None)) is not None:
                self._warner.warn(
                    f"job.dataset({split!r}): ranks {first_rank} and {other} have read different samples of the stream "
                    "at the same position. If they have different orders, some samples count twice, and others never: "
                    "seed each shuffle alike in every process, do not divide the stream by rank, or set data.read=run",
                    topic=f"order of {split}",
                )

    def share_position(self, sources: Sequence[int], *, samples_consumed: int) -> None:
        """Let new processes begin to read the stream where a survivor can. All ranks call this after a failure.

        Args:
            sources: for each rank, the rank whose state it received; a survivor is its own source.
        """
        rank = self._assignment.global_rank
        survivor = next((r for r, source in enumerate(sources) if r == source), None)
        if survivor is None or len(sources) == 1 or not is_stream(self.datasets.train):
            return
        mark = None
        if rank == survivor and self._reader is not None:
            mark = self._reader.bookmark(samples_consumed)
        values = None if mark is None else mark.to_json()
        values = broadcast_json(values, source=survivor, rank=rank, device=self._device)
        if values is not None:
            self._mark = Mark.from_json(values)

    def _copied_ahead(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Return ``batches``; on a GPU, copies of them that begin one ahead."""
        if self._device.type == "cpu" or not self._strategy.traits.reads_data:
            return batches
        return prefetched(batches, SideStream(self._device))

    def _open_eval_batches(self, split: str, dataset: Any, loading: Loading) -> EvalBatches:
        mesh = self._assignment.plan.mesh
        return EvalBatches(
            dataset,
            loading,
            split=split,
            kept=self._kept(split, dataset),
            batch_size=self._strategy.eval_batch_size,
            data_parallel_size=mesh.data_parallel_size,
            dp_rank=mesh.dp_rank(self._assignment.global_rank),
            read=self._strategy.traits.reads_data,
            pad_ragged=self._strategy.traits.cuts_batches,
            seed=self._assignment.config.seed,
        )

    @property
    def _sampling(self) -> Sampling:
        config = self._assignment.config
        limit = config.train.limit_samples
        return Sampling(seed=config.seed, weights=self.datasets.weights, batches=self._batches, limit=limit)

    def _kept(self, split: str, dataset: Any) -> Sequence[int] | None:
        """Return the samples that ``train.limit_batches`` and ``train.limit_eval_batches`` leave to evaluate."""
        train = self._assignment.config.train
        if (count := train.limit_eval_samples(split)) is None:
            return None
        if split == TRAIN and train.limit_samples is not None and not is_stream(dataset):  # what is trained on
            order = self._sampling.order(dataset)
            return order.indices(0, min(count, order.n))
        return range(count if is_stream(dataset) else min(count, len(dataset)))

    def _loading(self, num_workers: int) -> Loading:
        return Loading(
            collate=self._job.collate,
            num_workers=num_workers,
            pin_memory=self._device.type == "cuda",
            timeout_s=self._assignment.config.recovery.loader_timeout_s,
        )

    def _reader_at(self, samples_consumed: int) -> Reader:
        """Return the reader of the training set, a stream, at the next sample of the run."""
        if self._reader is None or not self._reader.reaches(samples_consumed):
            dataset, seed = self.datasets.train, self._assignment.config.seed
            if self._reader is not None:
                dataset = self._opened(self._job, "train", seed)
            self._reader = (
                dataset.reader()
                if isinstance(dataset, Fed)
                else StreamReader(
                    dataset,
                    recent=2 * self._assignment.plan.loader_processes + 4,  # each loader process prefetches two batches
                    seed=seed,
                    batch_size=self._assignment.config.train.global_batch_size,
                    limit=self._assignment.config.train.limit_samples,
                    warn=lambda text: self._warner.warn(text, topic="stream order"),
                )
            )
            if self._mark is not None:
                self._reader.add_bookmark(self._mark)
        if self._strategy.traits.reads_data and (count := self._reader.go_to_mark(samples_consumed)):
            assert isinstance(self._reader, StreamReader), "a feeder reads past them"
            read_past(
                self._reader,
                count,
                batch_size=self._assignment.config.train.global_batch_size,
                tell=lambda text: self._warner.warn(text, topic=_NUMBERS.sub("", text)),
                before_each=self._is_reading_past,
            )
        return self._reader

    def _is_reading_past(self) -> None:
        self._gate.check(self._assignment.generation)
        self._outbox.tick()
