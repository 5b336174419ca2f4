"""The keys of strategies with shards of tensors, and the checks that the job's model can be divided as planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import has_gradient_hooks
from orchestrator.config.schema import Config
from orchestrator.config.text import first_few, to_cli
from orchestrator.model.modes import note_on_dropout
from orchestrator.model.precision import Precision, gathered_share
from orchestrator.model.tensor_slots import tensor_slots
from orchestrator.planning.memory import gathered_bytes, size_text
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.parts.wrapping import Group, bytes_by_group, groups_of, parameters_together
from orchestrator.strategies.update.job_optimizer import sparse_parameters


def gathered_at_once(config: Config, mesh: Mesh, model: nn.Module) -> float:
    """Return the bytes that a worker of a mesh has gathered at the same time."""
    options = MeshConfig.of(config.strategy)
    share = gathered_share(model, Precision.named(config.train.precision, "cpu").autocast_dtype)
    if mesh.pipeline == 1 or options.reshard_after_forward:
        keep_whole, groups = not options.reshard_after_forward, bytes_by_group(model, options.wrap)
        return gathered_bytes(groups, keep_whole=keep_whole, ahead=options.prefetch, share=share)
    return share * sum(p.nbytes for p in model.parameters()) / mesh.pipeline


def check_shards(config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Divide the job's model as planned.

    Args:
        config: the configuration.
        outline: the job and its model, which is divided.
        plan: the plan of the run.
        errors: receives a line for each reason why the model cannot be divided.

    Returns:
        Notes for the user, printed with the plan.
    """
    options, before = MeshConfig.of(config.strategy), len(errors)
    if options.cpu_offload and plan.device == "cpu":
        errors.append(
            "strategy.cpu_offload=true: workers compute on CPUs, so their shards are in host memory anyway; set it to "
            "false"
        )
    name, whole = f"strategy={config.strategy.name}", outline.whole
    if config.train.compile is not False and not config.train.compiles_blocks:
        errors.append(
            f"train.compile={to_cli(config.train.compile)}: {name} gathers parameters between the blocks of the model; "
            "set it to blocks, which compiles each of them"
        )
    try:
        groups = groups_of(whole.model, options.wrap)
    except ValueError as e:
        errors.append(str(e))
        return ()
    errors += part_errors(config, outline, groups)
    if len(errors) > before:
        return ()
    notes = []
    if not groups:
        notes.append(
            "the model has no repeated blocks, so each worker gathers all of it at once; name the classes of modules "
            "to gather one by one in strategy.wrap"
        )
    elif len(groups) < plan.mesh.num_shards:
        largest = max(sum(p.nbytes for p in parameters) for parameters in parameters_together(whole.model, groups)[:-1])
        notes.append(
            f"the model has {len(groups)} groups of modules for {plan.mesh.num_shards} workers: a worker gathers up to "
            f"{size_text(largest)} at once, more than its own shard, and more workers do not change that; name classes "
            "of smaller modules in strategy.wrap"
        )
    if whole.full_build_reason is not None:
        notes.append(
            f"job.model() cannot build a part of the model ({whole.full_build_reason}): each worker builds all of it "
            "at the start, which needs memory for the whole model, and then keeps its shard"
        )
    if (note := note_on_dropout(whole.model)) is not None:
        notes.append(note)
    return tuple(notes)


def part_errors(config: Config, outline: Outline, groups: Sequence[Group] = ()) -> list[str]:
    """Return why workers cannot train parts of the parameters of the job's model; ``groups`` are gathered together."""
    name, model = f"strategy={config.strategy.name}", outline.whole.model
    return [f"{name}: {reason}" for reason in _reasons(model, groups)]


def _reasons(model: nn.Module, groups: Sequence[Group]) -> list[str]:
    """Return why the parameters of a model cannot be divided."""
    reasons = []
    if others := [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]:
        reasons.append(
            f"{first_few(others, 2)} in the model's state_dict() is no tensor, and only tensors can be saved"
        )
    scripts = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted := [name or "the model" for name, m in scripts if next(m.parameters(), None) is not None]:
        reasons.append(
            f"{first_few(scripted, 2)} is in TorchScript, which keeps its parameters to itself; leave out "
            "torch.jit.script or torch.jit.trace (train.compile=blocks compiles it), or use strategy=ddp"
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    plain = [s for s in tensor_slots(model) if s.tensor in names and s.attribute in vars(s.owner)]
    if kept := [slot.name for slot in plain if type(slot.owner).__setattr__ is nn.Module.__setattr__]:
        reasons.append(
            f"{first_few(kept, 2)} is a parameter in a plain attribute, which would keep it as it was before it was "
            "divided; read it from its module in forward(), or use strategy=ddp"
        )
    if sparse := [names[parameter] for parameter in sparse_parameters([model])]:
        reasons.append(
            f"gradients of {first_few(sparse, 2)} are sparse, and sparse sums cannot be divided; make the embedding "
            "dense (sparse=False), or use strategy=ddp"
        )
    if hooked := [name for name, parameter in model.named_parameters() if has_gradient_hooks(parameter)]:
        reasons.append(
            f"the gradient hooks of {first_few(hooked, 2)} would not be called, because its gradient is never whole; "
            "change the gradient in Job.loss, or use strategy=ddp"
        )
    for parameters in parameters_together(model, groups):
        trained = sorted((p for p in parameters if p.requires_grad), key=torch.is_complex)
        if trained and torch.is_complex(trained[-1]) and not torch.is_complex(trained[0]):
            reasons.append(
                f"{names[trained[-1]]} is complex and {names[trained[0]]} is not, and their gradients are summed "
                "together; keep its real and imaginary parts in a real parameter (torch.view_as_real)"
            )
    return reasons
