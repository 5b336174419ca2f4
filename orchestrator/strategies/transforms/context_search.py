"""How the samples of a job are divided by tokens: found in passes without memory, and tried with random weights.

Each rank looks for itself, and finds the same. What is found is proven by the driver
(:func:`orchestrator.strategies.transforms.context.TokenPart.check`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.compat.modules import hooks_of
from orchestrator.model.batch import map_leaves, map_tensors, tensors_in
from orchestrator.model.context.division import Division
from orchestrator.model.context.tokens import UNSEEN, Axes, ContextPart, NotDivisible, axes_of, shapes_in
from orchestrator.model.failed_call import error_with_place
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.peers import Peers
from orchestrator.model.proofs.divided_tokens import Differs, NotCalled, Pass, prove
from orchestrator.model.proofs.proven_model import MOST_PRECISE, TENSOR, ProvenModel, alike_between
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.model.tensor.block_calls import ends_of, seen_calls
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.transforms.context_plan import ContextPlan
from orchestrator.strategies.transforms.loss_proof import loss_divides
from orchestrator.strategies.transforms.token_samples import TokenLength, real_samples, token_lengths

TOKENS = 64
"""The least number of tokens in a sample that a model is tried with, of those that it has."""
MOST_WORK = 10**9
"""The product of parameters and tokens up to which a model is tried with samples of their own length."""
MOST_TRIES = 16
"""The divisions that are tried."""
MOST_LOGITS = 2**24
"""The entries of an output up to which a loss is tried with samples of their own length."""
LEAST_SHARE = 0.1
"""The part of the parameters of the blocks in modules that compute a worker's own tokens."""


@dataclass(frozen=True)
class FoundContext:
    """A plan, and what it has been found with.

    Attributes:
        plan: the plan.
        model: the model with random weights.
        samples: real samples of different rows, some of their tokens, or all if ``is_whole``.
    """

    plan: ContextPlan
    model: ProvenModel
    samples: tuple[Any, ...]
    is_whole: bool


def found_context(outline: Outline, train_set: Any, count: int) -> FoundContext:
    """Find how the samples of a job can be divided.

    Args:
        outline: the job and its model.
        train_set: provides samples.
        count: the number of workers.

    Raises:
        ValueError: they cannot be divided; the text says why.
    """
    whole = outline.whole
    if not blocks_of(whole.model):
        raise NotDivisible("the model has no nn.ModuleList or nn.Sequential with several blocks of one class")
    samples = real_samples(outline.job, train_set)
    work = sum(parameter.numel() for parameter in whole.model.parameters())
    errors: list[NotDivisible] = []
    for which in token_lengths(samples[0][0]):
        try:
            trial = _Trial.of(outline, samples, which, count, work)
            return trial.found()
        except NotDivisible as e:
            errors.append(e)
    if not errors:
        shapes = [list(tensor.shape[1:]) for tensor in tensors_in(samples[0][0])]
        raise NotDivisible(
            f"the samples have no tokens: an input of a sample has the shape {shapes[0] if shapes else []}"
        )
    raise next((e for e in errors if isinstance(e, Differs)), errors[0])


@dataclass
class _Calls:
    """The shapes that modules are first called with and return, and the trees that these are in, by name."""

    given: dict[str, list[Any]] = field(default_factory=dict)
    returned: dict[str, list[Any]] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record the calls in the block."""

        def before(name: str) -> Any:
            def see(module: nn.Module, args: Any, kwargs: Any) -> None:
                self.given.setdefault(name, shapes_in((args, kwargs)))

            return see

        def after(name: str) -> Any:
            def see(module: nn.Module, args: Any, output: Any) -> None:
                self.returned.setdefault(name, shapes_in(output))
                self.trees.setdefault(name, map_tensors(lambda tensor: TENSOR, output))

            return see

        with contextlib.ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(name)).remove)
            yield


@dataclass
class _Trial:
    """A search for the division of samples of one length.

    Attributes:
        outline: the job and its model.
        count: the number of workers.
        blocks: the repeated blocks.
        lengths: the numbers of tokens that the model has been called with.
        calls: what modules in blocks have been called with, for each of these.
        output: the output for the first one, without memory.
        outputs: the axes of the output.
        samples: inputs, of the first of these lengths.
        work: the number of parameters.
        target: whole ones.
    """

    outline: Outline
    count: int
    which: TokenLength
    blocks: Mapping[str, nn.Module]
    lengths: tuple[int, int]
    calls: tuple[_Calls, _Calls]
    output: Any
    outputs: Axes
    samples: tuple[Any, ...]
    target: Any
    work: int

    @classmethod
    def of(
        cls, outline: Outline, samples: Sequence[tuple[Any, Any]], which: TokenLength, count: int, work: int
    ) -> _Trial:
        """Call the model without memory.

        Raises:
            NotDivisible: it cannot be called, or its blocks have no tokens.
        """
        ContextPart(index=0, count=count, length_of=(which.number, 1)).begin(samples[0][0])
        step = 2 * count
        tokens = min(which.length, -(-max(TOKENS, MOST_WORK // max(1, work)) // step) * step)
        job, whole = outline.job, outline.whole
        blocks = {name: m for name, m in whole.model.named_modules() if m in {*blocks_of(whole.model)}}
        inside = {f"{b}.{n}" if n else b: m for b, block in blocks.items() for n, m in block.named_modules()}

        def run(tokens: int) -> Any:
            given = job.positioned(which.first(samples[0][0], tokens))
            return job.forward(whole.model, map_tensors(whole.fake_input, given))

        def seen(tokens: int) -> tuple[_Calls, Any]:
            calls = _Calls()
            with calls.of(inside):
                _, output = seen_calls(whole, {}, lambda: run(tokens))
            return calls, output

        try:
            first, output = seen(tokens)
            try:
                other = tokens // 2
                second, other_output = seen(other)
            except Exception:
                other = 2 * tokens
                second, other_output = seen(other)
        except Exception as e:
            raise NotDivisible(f"the model cannot be called with short samples ({error_with_place(e)})") from e
        if missing := next((name for name in blocks if name not in first.given), None):
            raise NotDivisible(f"{missing} is not called")
        return cls(
            outline=outline,
            count=count,
            which=which,
            blocks=blocks,
            lengths=(tokens, other),
            calls=(first, second),
            output=output,
            outputs=axes_of(shapes_in(output), shapes_in(other_output), (tokens, other)),
            samples=tuple(which.first(inputs, tokens) for inputs, _ in samples),
            target=samples[0][1],
            work=work,
        )

    def found(self) -> FoundContext:
        """Return the first division with which the model computes the same, in training and in evaluations.

        Raises:
            NotDivisible: there is none.
        """
        divided = {name: self._axes(name)[0] for name in self.blocks}
        divided = {name: axes for name, axes in divided.items() if _has_rows(axes)}
        if not divided:
            raise NotDivisible("the blocks of the model are not called with a row for each token of a sample")
        division = Division(blocks=divided, outputs=self.outputs, length_of=(self.which.number, 1))
        if not _has_rows(self.outputs):
            division = self._ended_whole(division)
        model = ProvenModel.random(self.outline.build, dtype=self._precise, skipped=self._skipped)
        tries = 0
        while True:
            try:
                model = self._tried(model, division)
                break
            except Differs as e:
                following = self._adapted(division, e.module)
                tries += 1
                if following is None or tries == MOST_TRIES:
                    raise
                division = following
        plan = ContextPlan(count=self.count, division=division)
        return FoundContext(
            plan=replace(plan, by_rows=self._loss_divides(plan)),
            model=model,
            samples=self.samples,
            is_whole=self.lengths[0] == self.which.length,
        )

    @functools.cached_property
    def _leaves(self) -> frozenset[str]:
        """The blocks of which something else than a block reads what they return, in training or in evaluations."""
        whole, job = self.outline.whole, self.outline.job

        def run() -> Any:
            return job.forward(whole.model, map_tensors(whole.fake_input, job.positioned(self.samples[0])))

        _, trains = seen_calls(whole, {}, lambda: ends_of(self.blocks, [run]))
        with evaluation_mode(whole.model), torch.no_grad():
            _, evaluates = seen_calls(whole, {}, lambda: ends_of(self.blocks, [run]))
        return frozenset((*trains.leaves, *evaluates.leaves))

    @property
    def _precise(self) -> torch.dtype:
        skipped = [self.blocks[name] for name in self._skipped]
        count = self.work - sum(parameter.numel() for block in skipped for parameter in block.parameters())
        return torch.float64 if count <= MOST_PRECISE else torch.float32

    @property
    def _skipped(self) -> Mapping[str, Any]:
        """What blocks return that need not run."""
        if self.work * TOKENS <= MOST_WORK:
            return {}
        names = [name for name in alike_between(self.blocks) if name not in self._leaves]
        return {name: self.calls[0].trees[name] for name in names}

    def _axes(self, name: str) -> tuple[Axes, Axes]:
        """Return the axes of what a module is called with, and of what it returns."""
        (first, second), lengths = self.calls, self.lengths
        given = axes_of(first.given[name], second.given[name], lengths)
        return given, axes_of(first.returned[name], second.returned[name], lengths)

    def _tried(self, model: ProvenModel, division: Division) -> ProvenModel:
        """Compare a model with itself in parts; return it in the precision in which it can be called."""
        inputs, job = self.samples[0], self.outline.job
        passes = (Pass(inputs), Pass(inputs, trains=False))
        with drawing(0):
            try:
                prove(job, model, division, passes, self.count)
            except NotCalled:
                if model.dtype is torch.float32:
                    raise
                model = ProvenModel.random(
                    self.outline.build, dtype=torch.float32, skipped=self._skipped
                )  # some operators lack float64
                prove(job, model, division, passes, self.count)
        return model

    def _adapted(self, division: Division, differing: str | None) -> Division | None:
        """Return a division in which a module that has computed something else computes all tokens; None if none is."""
        block = next((b for b in division.blocks if f"{differing}.".startswith(f"{b}.")), None)
        if differing is None or block is None:
            return None if division.ends_whole else self._ended_whole(division)
        path = differing[len(block) + 1 :]
        while f"{block}.{path}" in division.whole:
            path = path.rpartition(".")[0]
        if not path:
            return None
        kinds = type(self.blocks[block]), type(self.blocks[block].get_submodule(path))
        alike = [
            f"{name}.{path}"
            for name in division.blocks
            if (type(self.blocks[name]), type(dict(self.blocks[name].named_modules()).get(path))) == kinds
        ]
        known = {*self.calls[0].returned} & {*self.calls[1].returned}
        if not {*alike} <= known:
            return None
        outside = {n: a for n, a in division.whole.items() if not any(n.startswith(f"{other}.") for other in alike)}
        whole = {**outside, **{name: self._axes(name) for name in alike}}
        modules = dict(self.outline.whole.model.named_modules())
        total, all_tokens = (sum(p.numel() for n in of for p in modules[n].parameters()) for of in (self.blocks, whole))
        return replace(division, whole=whole) if total - all_tokens >= LEAST_SHARE * total else None

    def _ended_whole(self, division: Division) -> Division:
        """Return a division with which whatever follows the blocks computes all tokens."""
        hooked = any(hooks_of(block) for block in self.blocks.values())  # which may see what they return
        leaves = self.blocks if hooked else self._leaves
        gathered = {name: self._axes(name)[1] for name in leaves if name in division.blocks}
        if lost := next((name for name, axes in gathered.items() if not _has_rows(axes)), None):
            raise NotDivisible(f"{lost} does not return a row for each token of a sample")
        return replace(division, gathered=gathered, outputs=(None,) * len(self.outputs))

    def _loss_divides(self, plan: ContextPlan) -> bool:
        """Return whether the loss is the mean of the losses of parts."""
        if plan.division.ends_whole:
            return False
        axes, tokens = plan.division.outputs, self.lengths[0]
        entries = sum(tensor.numel() for tensor in tensors_in(self.output)) // tokens
        step = 2 * plan.count
        length = min(self.which.length, -(-max(TOKENS, MOST_LOGITS // max(1, entries)) // step) * step)
        known = iter(axes)

        def resized(leaf: Any) -> Any:
            axis = next(known)
            if not isinstance(leaf, Tensor):
                return leaf
            shape = [length if i == axis and size == tokens else size for i, size in enumerate(leaf.shape)]
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        def part_of(index: int, peers: Peers | None = None) -> ContextPart:
            return ContextPart(index=index, count=plan.count, peers=peers or Peers(), length=length)

        by_rows = replace(plan, by_rows=True)
        return loss_divides(
            self.outline.job,
            map_leaves(resized, self.output),
            self.which.first(self.target, length),
            count=plan.count,
            cut=lambda tree, index: part_of(index).rows(tree, axes),
            loss=lambda own, labels, index, peers: by_rows.loss(self.outline.job, own, labels, part_of(index, peers)),
        )


def _has_rows(axes: Axes) -> bool:
    return any(axis not in (None, UNSEEN) for axis in axes)
