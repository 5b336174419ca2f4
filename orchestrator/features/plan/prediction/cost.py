"""The time of a training step, from the work of a model, its layout and the cluster. Pure.

Products and attention run at a share of the device's peak rate, which is measured once for a stack of software;
everything else moves bytes. A collective takes its bytes over the bus bandwidth of its group, less what computation
hides.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from orchestrator.features.plan.prediction.devices import Cluster, Precision
from orchestrator.features.plan.prediction.work import BYTES, ModelWork
from orchestrator.planning.mesh import Mesh

STREAMED = 0.8
"""The share of the memory's bandwidth that elementwise operations reach."""
GATHER_HIDDEN, GATHER_SEEN = 0.9, 0.04
"""Gathers and sums of shards hide behind the first share of computation, which they slow down by the second."""
SUMS_HIDDEN = 2.0
"""Sums over replicas, once a step, hide behind so many passes of a micro-batch."""
KEYS_HIDDEN = 0.5
"""Exchanges of keys and values hide behind this share of attention."""
SENDS_SEEN = 0.3
"""The share of the transfers between stages that is not hidden."""
UPDATE_BYTES = 28
"""What an update of AdamW reads and writes for a parameter."""
TILED = 1.5
"""How often matrix products read and write their operands, because of their tiles."""
WHOLE_OPERANDS = 4
"""The operands of a layer's products, as multiples of its output, that each tensor rank reads or writes whole: the
inputs of what is divided by columns, and the outputs of what is divided by rows (arXiv:1909.08053, section 3)."""
MET_IN_LAYER = 4
"""The collectives of tensor ranks in a layer, forward and backward."""
SETTLE_S = 0.002
"""What a step costs beside all that."""
HEAD_MOST = 0.75
"""The largest share of bf16's peak rate that the head reaches, whose products stay in bf16."""
PARTLY = 0.5
"""Up to this share of products that are computed again, the sums of tensor ranks and what is fused are not."""
HEAD_SHARE = 0.6
"""The share of the head's time by which a pipeline's last stage holds up the others."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a stack of software makes of a device.

    Attributes:
        products: the share of the peak rate in matrix products.
        attention: the share of bf16's peak rate in attention.
        moved: the share of the bytes that elementwise operations move after fusion.
        dispatch_s: the time of the host to send the tokens of a micro-batch to the experts of a layer and back.
        operator_s: the time that an operator takes of any size, where the device waits for the host.
        host: what CPUs do beside the operators, whose cores communicate too; None for GPUs, where communication hides
            behind computation.
    """

    products: float
    attention: float
    moved: float = 1.0
    dispatch_s: float = 0.0
    operator_s: float = 0.0
    host: Host | None = None


@dataclass(frozen=True, kw_only=True)
class Host:
    """What steps on CPUs take beside the operators of a pass.

    Attributes:
        stage_s: the time of a pass of a stage over a micro-batch.
        collective_s: the time by which the ranks meet for a collective within a pass.
        shard_factor: what gathers and sums of shards take, relative to sums of whole gradients.
        accumulated_bytes: what is moved to add the gradient of a parameter to that of earlier micro-batches.
        tensor_operators: the operators that update a tensor.
        summed_operators: those by which its gradient comes to a sum over ranks.
        divided_operators: those that divide it over ranks, or its update.
    """

    stage_s: float = 0.0
    collective_s: float = 0.0
    shard_factor: float = 1.0
    accumulated_bytes: float = 0.0
    tensor_operators: float = 0.0
    summed_operators: float = 0.0
    divided_operators: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """How a step is laid out.

    Attributes:
        mesh: the sizes of its dimensions.
        rows: the samples of a micro-batch.
        passes: the micro-batches of a replica in a step.
        expert: the ranks that the experts of a layer are divided over, of those that train on different samples.
        chunks: the stages of a worker.
        fullest: the layers of the worker that has most, relative to the mean.
        bubble: the time that a pipeline waits relative to the time that it computes.
        recompute: the share of the forward products that the backward pass computes again.
        recompute_attention: the same of attention.
        gathers: whether workers have shards of the parameters, and gather them.
        divides_update: whether workers that have the same parameters divide the update of them.
        gathers_each_pass: whether they do so for each micro-batch, and not once in a step.
        gathers_again: whether they do so again for the backward pass, except for what is in no layer.
        sums_each_pass: whether they sum gradients after each micro-batch, and not once in a step.
        precision: what products are computed in.
        gathered_bytes: the bytes of a parameter when it is gathered.
        gathered_more: the bytes that all parameters outside of layers have in addition then, such as tables that are
            not cast.
        summed_bytes: the bytes of a gradient when it is summed.
        exchanged_bytes: what those with the same parameters exchange in a step for each: sums of gradients.
        updated_bytes: what they exchange in addition: updated parameters.
        divides_sends: whether tensor ranks divide what is sent from stage to stage.
        divides_ends: whether tensor ranks divide embeddings and the head too, and not only the layers.
        overlaps_tensor: the share of the exchanges between tensor ranks that hides behind products.
    """

    mesh: Mesh
    rows: float
    passes: float
    expert: int = 1
    chunks: int = 1
    fullest: float = 1.0
    bubble: float = 0.0
    recompute: float = 0.0
    recompute_attention: float = 0.0
    gathers: bool = True
    divides_update: bool = False
    gathers_each_pass: bool = True
    gathers_again: bool = True
    sums_each_pass: bool = True
    precision: Precision = "bf16"
    gathered_bytes: float = 2.0
    gathered_more: float = 0.0
    summed_bytes: float = 4.0
    exchanged_bytes: float = 6.0
    updated_bytes: float = 0.0
    divides_sends: bool = True
    divides_ends: bool = True
    overlaps_tensor: float = 0.0

    @property
    def samples(self) -> float:
        """The global batch."""
        return self.rows * self.passes * self.mesh.data_parallel_size

    @property
    def shards(self) -> int:
        """The ranks that the parameters are divided over, those that compute a sample together included."""
        return self.mesh.shard * self.mesh.context if self.gathers else 1

    @property
    def copies(self) -> int:
        """The ranks that have the same parameters."""
        return self.mesh.data_parallel_size * self.mesh.context // self.shards

    def own_parameters(self, work: ModelWork) -> float:
        """Return how many parameters a rank has."""
        of_layers = work.layers * (work.layer.parameters + work.layer.experts / self.expert)
        return (of_layers + work.ends.parameters) / (self.mesh.tensor * self.mesh.pipeline * self.shards)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step by what takes them; of communication, what is not hidden."""

    products: float
    attention: float
    moved: float
    host: float
    update: float
    shard: float
    replicate: float
    tensor: float
    context: float
    expert: float
    sends: float
    bubble: float

    @property
    def total(self) -> float:
        """The seconds of a step."""
        return math.fsum(dataclasses.astuple(self))


def step_time(work: ModelWork, step: Step, cluster: Cluster, stack: Stack) -> StepTime:
    """Return the time of a step."""
    one = _one_pass(work, step, cluster, stack)
    mesh, passes, a_pass = step.mesh, step.passes, float(sum(dataclasses.astuple(one)))
    sent = sent_bytes(work, step)

    of_shards = cluster.bus_bytes_s((mesh.tensor, step.shards))
    each, once = sent.shards_each_pass / of_shards, sent.shards_once / of_shards
    of_copies = (mesh.tensor, mesh.shard * mesh.context // step.shards), (mesh.distance("replicate"), mesh.replicate)
    host, hiding = stack.host or Host(), a_pass * (stack.host is None)
    exchanging = (sent.replicas + host.shard_factor * sent.updates) / cluster.bus_bytes_s(*of_copies)
    # What hides behind computation leaves less of it for what comes next.
    hidden = passes * min(each, GATHER_HIDDEN * hiding)
    hidden += min(once, GATHER_HIDDEN * hiding, passes * hiding - hidden)
    slowed = GATHER_SEEN * (passes * min(each, hiding) + min(once, hiding))
    gathering = host.shard_factor * (passes * each + once) - hidden + slowed
    if step.shards > 1:
        groups = 1 + work.layers * (work.layer.parameters > 0)
        gathering += (passes if step.gathers_each_pass else 1) * 3 * groups * host.collective_s
    summing = exchanging - min(exchanging, SUMS_HIDDEN * hiding, passes * hiding - hidden)
    stages_meet = cluster.domain % (mesh.distance("pipeline") * mesh.pipeline) == 0
    sends = passes * sent.stages / (cluster.inside if stages_meet else cluster.between).bytes_s
    sends *= SENDS_SEEN if stack.host is None else 1.0
    sends += passes * 2 * step.chunks * host.stage_s * (mesh.pipeline > 1)
    waits = step.bubble * (mesh.pipeline - step.fullest) / max(1, mesh.pipeline - 1)  # for stages with less to do
    accumulated = (passes - 1) * step.own_parameters(work) * host.accumulated_bytes
    divides = step.divides_update or step.shards > 1
    operators = host.tensor_operators + host.summed_operators * (step.copies * step.shards > 1)
    in_tensors = stack.operator_s * (operators + host.divided_operators * divides) * work.tensors / mesh.pipeline
    updated = step.own_parameters(work) / (step.copies if step.divides_update else 1)
    return StepTime(
        products=passes * one.products,
        attention=passes * one.attention,
        moved=passes * one.moved + accumulated / cluster.device.memory_bytes_s,
        host=passes * one.host,
        update=updated * UPDATE_BYTES / cluster.device.memory_bytes_s + in_tensors + SETTLE_S,
        shard=gathering,
        replicate=summing,
        tensor=passes * (one.tensor + MET_IN_LAYER * work.layers * host.collective_s * (mesh.tensor > 1)),
        context=passes * one.context,
        expert=passes * one.expert,
        sends=sends,
        bubble=waits * (passes * a_pass / step.fullest + gathering + sends),
    )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The bytes that a rank sends over the bus of its group: of a gather or a sum of ``n`` ranks, ``(n - 1) / n``.

    Attributes:
        shards_each_pass: with the ranks that have other shards, for a micro-batch.
        shards_once: with the same ranks, once in a step.
        replicas: with the ranks that have the same parameters, once in a step: gradients.
        updates: with the same ranks: parameters.
        tensor: with the ranks that divide its layers, for a layer and a micro-batch.
        stages: to the stages before and after, for a micro-batch.
    """

    shards_each_pass: float
    shards_once: float
    replicas: float
    updates: float
    tensor: float
    stages: float


def sent_bytes(work: ModelWork, step: Step) -> Sent:
    """Return what an average rank sends."""
    mesh, shards, copies, tensor = step.mesh, step.shards, step.copies, step.mesh.tensor
    rows, output, summed_output = step.rows / mesh.context, work.layer.output_bytes, work.layer.summed_bytes
    in_layers, parts = work.parameters - work.ends.parameters, tensor * mesh.pipeline
    gathered = step.gathered_bytes * (work.parameters + step.gathers_again * in_layers) + step.gathered_more
    summed, of_group = step.summed_bytes * work.parameters, (shards - 1) / shards / parts
    each = step.gathers_each_pass * gathered + step.sums_each_pass * summed
    forward = 2 if step.recompute <= PARTLY else 4  # the sums in a layer, which may be computed again
    return Sent(
        shards_each_pass=of_group * each,
        shards_once=of_group * (gathered + summed - each),
        replicas=(copies - 1) / copies * step.own_parameters(work) * step.exchanged_bytes,
        updates=(copies - 1) / copies * step.own_parameters(work) * step.updated_bytes,
        tensor=2 * (tensor - 1) / tensor * rows * (forward * summed_output + 2 * output),
        stages=2 * step.chunks * rows * output / (tensor if step.divides_sends else 1) if mesh.pipeline > 1 else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """The seconds of a forward and a backward pass of a rank over a micro-batch."""

    products: float
    attention: float
    moved: float
    host: float
    tensor: float
    context: float
    expert: float


def _one_pass(work: ModelWork, step: Step, cluster: Cluster, stack: Stack) -> _Pass:
    mesh, layer, ends = step.mesh, work.layer, work.ends
    memory, wide = cluster.device.memory_bytes_s, cluster.device.peak_flops_s("bf16")
    peak, is_narrow = cluster.device.peak_flops_s(step.precision), step.precision != "bf16"
    layers = step.fullest * work.layers / mesh.pipeline
    of_context = step.rows / mesh.context
    rows = of_context / mesh.tensor  # the share of a rank in the samples and their computation
    weights = layer.parameters / mesh.tensor + layer.experts / (mesh.tensor * step.expert)
    whole = min(WHOLE_OPERANDS * layer.summed_bytes, layer.product_bytes)
    product_bytes = TILED * (BYTES * weights + of_context * whole + rows * (layer.product_bytes - whole))
    products = (3 + step.recompute) * (rows * layer.products / (peak * stack.products) + product_bytes / memory)
    attention = (3 + step.recompute_attention) * rows * layer.attention / (wide * stack.attention)
    again = 1 + step.recompute / 3 if step.recompute > PARTLY else 1.0
    moved = rows * layer.moved_bytes * stack.moved * again + is_narrow * rows * layer.product_bytes  # and casts
    at_ends = 1.0 if mesh.pipeline == 1 else HEAD_SHARE
    head = at_ends * (1 if step.divides_ends else mesh.tensor)
    summing = sent_bytes(work, step).tensor / cluster.bus_bytes_s((1, mesh.tensor))
    of_head = min(HEAD_MOST, stack.products * (2 if is_narrow else 1))
    return _Pass(
        products=layers * products + head * 3 * rows * ends.products / (wide * of_head),
        attention=layers * attention,
        moved=(layers * moved + head * rows * ends.moved_bytes) / (memory * STREAMED),
        host=stack.operator_s * (layers * (3 + step.recompute) * layer.operators + at_ends * 3 * ends.operators),
        tensor=layers * summing * (1 - step.overlaps_tensor),
        context=max(0.0, layers * (_between_context_ranks(work, step, cluster) - KEYS_HIDDEN * attention)),
        expert=layers * _between_experts(work, step, cluster, stack),
    )


def _between_context_ranks(work: ModelWork, step: Step, cluster: Cluster) -> float:
    """All keys and values, three times."""
    tensor, context = step.mesh.tensor, step.mesh.context
    sent = 3 * 2 * (context - 1) / context * step.rows * work.layer.key_bytes / tensor
    return sent / cluster.bus_bytes_s((tensor, context))


def _between_experts(work: ModelWork, step: Step, cluster: Cluster, stack: Stack) -> float:
    """Tokens to their experts and back, forward and backward: to each domain of devices once, and on inside of it."""
    routed = work.layer.routed
    if not routed:
        return 0.0
    inside, domains = min(step.expert, cluster.domain), max(1, step.expert // cluster.domain)
    sent = 4 * step.rows / step.mesh.context / step.mesh.tensor * work.layer.output_bytes
    inside_s = sent * routed * (inside - 1) / inside / cluster.inside.bytes_s
    between_s = sent * min(routed, domains) * (domains - 1) / domains / cluster.between.bytes_s
    return stack.dispatch_s + inside_s + between_s
