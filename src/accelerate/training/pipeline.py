"""Pipelines that train: a model's stages over the ranks of the mesh's dimension `pp`, and the schedule that micro-batches follow."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from accelerate import comm
from accelerate.checkpoint.state import tied_names, together
from accelerate.config.enums import FP8BackendType
from accelerate.parallel import consistency, stages
from accelerate.parallel.balance import costly_stages
from accelerate.parallel.batches import Inputs, Outputs
from accelerate.parallel.mesh import shard_mesh, submesh
from accelerate.precision import master
from accelerate.runtime.torch_private import pytree
from accelerate.training import gradients, prepare
from accelerate.training.prepared import Facade
from accelerate.utils.operations import send_to_device
from accelerate.utils.versions import is_torch_version

# How many stages each rank has.
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
# What may be left from an earlier exchange: the gradient of a parameter that several ranks have is their sum.
_SUMMED = "_accelerate_summed"


@dataclass(frozen=True)
class Holdings:
    """Which ranks of a pipeline have which parameters and buffers, by the names of the user's model.

    Attributes:
        tensors: Of the whole model, each once, on the meta device.
        holders: Places in the pipeline that have each of them, in order.
        place: This rank's place in the pipeline.
        ranks: The ranks of this pipeline, and their process group.
        ties: Groups of names that mean one parameter.
        elsewhere: Names in the whole model's state that this rank's part does not have.
    """

    tensors: Mapping[str, torch.Tensor]
    holders: Mapping[str, tuple[int, ...]]
    place: int
    ranks: Sequence[int]
    group: Any
    ties: list[list[str]]
    elsewhere: frozenset[str]

    @property
    def repeated(self) -> list[str]:
        """The names of what this rank has and an earlier one, too."""
        return [name for name, places in self.holders.items() if self.place in places[1:]]


@dataclass
class _Batch:
    """The batch that is under way: how its rows count, and what has come out so far."""

    rows: int
    each: int
    target: Any
    factor: float
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def samples(self, number: int) -> int:
        """Return how many samples of a micro-batch are the user's; the others fill it."""
        return min(max(self.rows - number * self.each, 0), self.each)

    def target_of(self, number: int) -> Any:
        """Return the part of the target that belongs to a micro-batch; of one without samples, that of what fills it."""
        start = min(number * self.each, self.rows - 1)
        stop = start + max(self.samples(number), 1)
        return pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor[start:stop] if tensor.ndim else tensor, self.target
        )


class Pipeline(nn.Module):
    """This rank's stages of a model that trains as a pipeline, with the parameters under the names of the user's model.

    ``Accelerator.prepare_pipeline`` makes it. A call takes a whole batch of this data-parallel rank, the same on all ranks of the pipeline,
    runs forward and backward, and returns the loss on each of them: the mean over the samples, detached. In evaluation, or under
    ``torch.no_grad``, there is no backward; without a `target`, a pipeline that was given a `loss` returns what the model returns.

    Attributes:
        holdings: Which ranks have which parameters.
    """

    def __init__(
        self,
        accelerator: Facade,
        chain: stages.Chain,
        inputs: Inputs,
        outputs: Outputs,
        loss: Callable | None,
        microbatches: int,
    ) -> None:
        super().__init__()
        self._accelerator, self._chain, self._inputs, self._outputs = accelerator, chain, inputs, outputs
        self._loss, self._microbatches = loss, microbatches
        self._held, self._batch = False, None
        self._groups: dict[str, Any] = {}
        self.holdings: Holdings

    def _begin(self, own: Mapping[int, stages.Stage], schedule: str, holdings: Holdings) -> None:
        """Make the schedule of this rank's stages, whose parameters are placed and sharded."""
        self.holdings, self._own = holdings, own
        count, carried = len(self._chain.names), self._chain.carried
        built = [
            PipelineStage(
                stage,
                number,
                count,
                self._accelerator.device,
                input_args=carried[number],
                output_args=carried[number + 1],
                group=holdings.group,
            )
            for number, stage in own.items()
        ]
        kind, given = get_schedule_class(schedule), built if SCHEDULES[schedule] > 1 else built[0]
        # Each micro-batch has its weight already.
        self._schedule = kind(given, self._microbatches, loss_fn=self._loss_of, scale_grads=False)
        self._owners = [holdings.ranks[_place(schedule, stage, len(holdings.ranks))] for stage in range(count)]
        self._last = self._owners[-1]
        self._is_first, self._is_last = 0 in own, count - 1 in own

    def _adopt(self, name: str, tensor: torch.Tensor, persistent: bool) -> None:
        """Have a parameter or buffer under its full name."""
        *path, last = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor, persistent)

    def train(self, mode: bool = True) -> "Pipeline":
        """Let the stages compute as in training, or in evaluation; ValueError if the model does other operations there."""
        if not mode and self._chain.evaluates:
            raise ValueError(
                f"{self._chain.evaluates}, so its pipeline does not evaluate. Keep it in training mode under torch.no_grad(), or evaluate "
                "the checkpoint in a process of its own."
            )
        for stage in self._own.values():
            stage.train(mode)
        return super().train(mode)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on their rank meanwhile, but for those that FSDP shards."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a whole batch through the pipeline. All ranks.

        Args:
            *args: Arguments of the model, as the example had them, with any number of samples up to that of all micro-batches.
            **kwargs: Keyword arguments of it; and ``target`` for a pipeline with a ``loss``, with as many samples.

        Raises:
            ValueError: The batch does not fit the example or the micro-batches; raised before anything is computed.
        """
        target = kwargs.pop("target", None) if self._loss is not None else None
        rows, tensors = self._inputs.match(args, kwargs)
        trains = self.training and torch.is_grad_enabled()
        self._check(rows, target, trains)
        device, inputs = self._accelerator.device, self._inputs
        factor = gradients.loss_factor(self._accelerator) if trains else 1.0
        batch = self._batch = _Batch(
            rows, inputs.rows, send_to_device(target, device) if self._is_last else None, factor
        )
        given = ()
        if self._is_first:
            cut = inputs.cut(tensors, 0, self._microbatches)
            given = tuple(cut[position].to(device) for position in self._chain.used)
        if trains:
            self._divide_summed()
            # The loss is called with the number of the micro-batch in place of its target.
            self._schedule.step(*given, target=torch.arange(self._microbatches), return_outputs=False)
            if self._accelerator.sync_gradients and not self._held:
                self._exchange()
        else:
            self._forward_only(given)
        self._batch = None
        if self._loss is not None and target is None:
            return self._all_outputs(batch)
        loss = torch.zeros((), device=device)
        if self._is_last:
            loss += torch.stack([value.float() for value in batch.losses]).sum()
        dist.broadcast(loss, self._last, group=self.holdings.group)
        return loss

    @torch.no_grad()
    def _forward_only(self, given: Sequence[torch.Tensor]) -> None:
        """Send the micro-batches through the stages one after the other, in the same order on all ranks of the pipeline."""
        group, device, me = self.holdings.group, self._accelerator.device, self._accelerator.process_index
        sent, results = [], ()
        pieces = list(zip(*(tensor.chunk(self._microbatches) for tensor in given), strict=True))
        for place in range(self._microbatches):
            for number, stage in self._own.items():
                if number == 0:
                    values = pieces[place]
                elif self._owners[number - 1] == me:
                    values = results
                else:
                    values = [torch.empty_like(value, device=device) for value in self._chain.carried[number]]
                    for value in values:
                        dist.recv(value, self._owners[number - 1], group=group)
                results = stage(*values)
                if number == len(self._owners) - 1:
                    self._loss_of(results, place)
                elif self._owners[number + 1] != me:
                    sent += [(dist.isend(value, self._owners[number + 1], group=group), value) for value in results]
        for work, _ in sent:
            work.wait()
        if self._accelerator.is_fsdp2:
            for stage in self._own.values():  # else the next forward would see these weights after a step
                stage.reshard()

    def _check(self, rows: int, target: Any, trains: bool) -> None:
        each = self._inputs.rows
        if rows > each * self._microbatches:
            raise ValueError(
                f"The batch has {rows} samples, but {self._microbatches} micro-batches of {each} hold {each * self._microbatches}. Prepare the pipeline "
                f"with an example of {-(-rows // self._microbatches)} samples, or with more micro-batches."
            )
        if self._loss is None and rows % each:
            raise ValueError(
                f"The batch has {rows} samples, which are no multiple of the {each} of a micro-batch, and the model computes the loss itself, over what would fill "
                "the last one, too. Give `prepare_pipeline` a loss, or the loader drop_last=True."
            )
        if self._loss is None:
            return
        if target is None:
            if trains:
                raise ValueError(
                    "A pipeline with a loss trains on a target: call it with target=..., beside the model's arguments."
                )
            return
        sizes = {len(leaf) for leaf in pytree.tree_leaves(target) if isinstance(leaf, torch.Tensor) and leaf.ndim}
        if sizes != {rows}:
            raise ValueError(
                f"target has {sorted(sizes) or 'no'} samples, and the batch {rows}. Give tensors with one row for each sample."
            )

    def _loss_of(self, outputs: Sequence[torch.Tensor], number: torch.Tensor | int) -> torch.Tensor:
        """Return what backward begins with for a micro-batch: its loss by the share of the batch's samples that it has."""
        batch, place = self._batch, int(number)
        count = batch.samples(place)
        if self._loss is None:
            loss = outputs[0]
        else:
            made = self._outputs.joined([outputs], max(count, 1))
            if batch.target is None:
                batch.outputs.append(tuple(tensor[: len(tensor) // batch.each * count] for tensor in outputs))
                return outputs[0].new_zeros(())
            loss = self._loss(made, batch.target_of(place))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(f"The loss is {loss!r}; return a tensor with one element, the mean over the samples.")
        share = loss.reshape(()) * (count / batch.rows)
        batch.losses.append(share.detach())
        return share * batch.factor

    def _all_outputs(self, batch: _Batch) -> Any:
        """Return on every rank what the model returns for a batch. All ranks of the pipeline."""
        device = self._accelerator.device
        shapes = self._outputs.shapes(batch.rows)
        if self._is_last:
            tensors = [torch.cat(column).contiguous() for column in zip(*batch.outputs, strict=True)]
        else:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        for tensor in tensors:
            dist.broadcast(tensor, self._last, group=self.holdings.group)
        return self._outputs.built(tensors)

    # -- gradients -----------------------------------------------------------------------------------------------

    def _shared(self) -> Iterator[tuple[nn.Parameter, int, Any]]:
        """Yield the parameters that other ranks of the pipeline have, too, with their number and process group."""
        own = dict(self.named_parameters())
        for name, places in self.holdings.holders.items():
            if len(places) > 1 and name in own and own[name].requires_grad:
                yield own[name], len(places), self._groups[name]

    def _divide_summed(self) -> None:
        """Make a share again of what is a sum over ranks already, so that the next sum counts it once."""
        for parameter, count, _ in self._shared():
            if getattr(parameter.grad, _SUMMED, False):
                parameter.grad.div_(count)
                setattr(parameter.grad, _SUMMED, False)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Sum the gradients of what several stages use, and average those of replicas. All ranks."""
        for parameter, _, group in self._shared():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(master.local_part(parameter.grad), group=group)
            setattr(parameter.grad, _SUMMED, True)
        mesh = self._accelerator.torch_device_mesh
        replicas = None if self._accelerator.is_fsdp2 else submesh(mesh, "dp_replicate")
        if replicas is not None:
            consistency.average_gradients(list(self.parameters()), replicas.get_group())


# -- preparing ---------------------------------------------------------------------------------------------------


def prepare_pipeline(
    accelerator: Facade,
    model: nn.Module,
    schedule: str,
    microbatches: int,
    split: str | Sequence[str],
    example: tuple[Sequence[Any], Mapping[str, Any]],
    loss: Callable | None,
) -> Pipeline:
    """Divide a model into stages, build this rank's, and register the pipeline. All ranks."""
    _check(accelerator, model, schedule, microbatches)
    accelerator._prepare_device_mesh()
    accelerator._backend.check(accelerator, ())
    mesh = accelerator.torch_device_mesh
    part = submesh(mesh, "pp")
    size = part.size()
    count = size * SCHEDULES[schedule]
    consistency.require_same_model(accelerator, model)
    if accelerator.is_fsdp2 and accelerator.mixed_precision != "no":
        master.upcast(model)

    def divided() -> tuple[stages.Chain, Inputs, Outputs, list[str]]:
        device = next(model.parameters()).device
        args, kwargs = send_to_device(tuple(example[0]), device), send_to_device(dict(example[1]), device)
        points = split
        if split == "auto":
            points = costly_stages(model, count, lambda: model(*args, **kwargs))
        points = [points] if isinstance(points, str) else list(points)
        inputs = Inputs(model, args, kwargs)
        outputs = Outputs(inputs.rows)
        record = _only_loss if loss is None else outputs.record
        chain = stages.trace(model, points, inputs, record, count, accelerator.device, accelerator.autocast)
        return chain, inputs, outputs, points

    chain, inputs, outputs, points = together(divided)
    given = points, schedule, microbatches, [str(leaf) for leaf in inputs.leaves]
    if not comm.current().is_same(given):
        raise ValueError(
            f"The ranks build different pipelines; this one has split={points}, schedule={schedule!r}, microbatches={microbatches} and an example of "
            f"{', '.join(given[3])}. Give every rank the same."
        )
    if accelerator.is_fsdp2:
        _refuse_twice(chain, schedule, size)
    numbers = [number for number in range(count) if _place(schedule, number, size) == part.get_local_rank()]
    pipeline = Pipeline(accelerator, chain, inputs, outputs, loss, microbatches)
    own = {number: together(lambda number=number: chain.build(number)).to(accelerator.device) for number in numbers}
    holdings = _holdings(model, chain, schedule, part)
    if accelerator.is_fsdp2:
        for stage in own.values():
            _shard(accelerator, stage)
    _fill(pipeline, model, own, holdings)
    together(lambda: pipeline._begin(own, schedule, holdings))
    _connect(pipeline, holdings, mesh)
    return prepare.register(accelerator, "model", pipeline, model)


def _place(schedule: str, stage: int, size: int) -> int:
    """Return which place of the pipeline has a stage: those of ZBV run to the last one and back."""
    return 2 * size - 1 - stage if schedule == "ZBVZeroBubble" and stage >= size else stage % size


def _check(accelerator: Facade, model: Any, schedule: str, microbatches: Any) -> None:
    """Refuse what has no pipeline, before anything is changed."""
    layout = accelerator.parallelism_config
    if layout is None or not layout.pp_enabled:
        raise ValueError(
            "prepare_pipeline needs ranks to divide the model over: pass parallelism_config=ParallelismConfig(pp_size=2), and launch as many processes."
        )
    if is_torch_version("<", "2.10"):
        raise ValueError("Pipelines train with torch 2.10 or newer. Run pip install 'torch>=2.10'.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_pipeline() got model={model!r} ({type(model).__name__}); pass a torch.nn.Module.")
    if accelerator.prepared.find(model) is not None:
        raise ValueError(
            f"This model ({type(model).__name__}) is prepared already. Use what that returned, or call free_memory() first."
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}.")
    size = layout.pp_size
    least = {"GPipe": 1, "1F1B": size, "Interleaved1F1B": size, "ZBVZeroBubble": 2 * size - 1}[schedule]
    whole = isinstance(microbatches, int) and not isinstance(microbatches, bool)
    if not whole or microbatches < least or (schedule == "Interleaved1F1B" and microbatches % size):
        raise ValueError(
            f"microbatches={microbatches!r} does not fit schedule={schedule!r} over pp_size={size}: give a whole number of at least {least}"
            f"{f', a multiple of {size}' if schedule == 'Interleaved1F1B' else ''}."
        )
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend.value != "NO" or accelerator.fp8_backend is not FP8BackendType.NO:
        raise ValueError(
            f"dynamo_backend={plugin.backend.value} and mixed_precision={accelerator.mixed_precision!r} with pp_size={size}: stages are neither compiled nor converted. Leave "
            "the backend out, and use mixed_precision='bf16' or 'no'."
        )
    named = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty or not any(parameter.requires_grad for parameter in model.parameters()):
        what = f"{empty[0]!r} is on the meta device" if empty else "it has no trainable parameter"
        raise ValueError(
            f"{type(model).__name__} cannot train as a pipeline: {what}. Load the weights first, and leave some of them trainable."
        )
    for name, module in model.named_modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)) and module.training:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) normalises over the batch, and would see one micro-batch at a time: another model than in one process. Use a "
                "normalisation of each sample, or freeze it by `.eval()`."
            )


def _only_loss(output: Any) -> tuple[torch.Tensor, ...]:
    """Return the loss that a model returns: the output itself, its entry or attribute `loss`, or its first element."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    found = found[0] if isinstance(found, (list, tuple)) and found else found
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ValueError(
            f"The model returns {type(output).__name__} without a loss, a tensor of one element (found: {getattr(found, 'shape', found)}). Give the example what the model "
            "computes it from (`labels`), or give `prepare_pipeline` a loss."
        )
    return (found.reshape(()),)


def _holdings(model: nn.Module, chain: stages.Chain, schedule: str, part: Any) -> Holdings:
    tensors = {
        name: tensor.detach().to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    ranks = dist.get_process_group_ranks(part.get_group())
    users = [(name, _place(schedule, stage, len(ranks))) for stage, names in enumerate(chain.names) for name in names]
    # What no stage uses, the first rank keeps.
    holders = {name: tuple(sorted({place for used, place in users if used == name})) or (0,) for name in tensors}
    place = part.get_local_rank()
    kept = {name for name in tensors if place in holders[name]}
    elsewhere = frozenset(name for name in model.state_dict() if name not in kept)
    return Holdings(tensors, holders, place, ranks, part.get_group(), tied_names(model), elsewhere)


def _fill(pipeline: Pipeline, model: nn.Module, own: Mapping[int, stages.Stage], holdings: Holdings) -> None:
    """Give the pipeline what this rank has, under its full name: of its stages, and what no stage uses."""
    saved = model.state_dict()
    found = {name: tensor for stage in own.values() for name, tensor in stage.body.named_parameters()}
    found |= {name: tensor for stage in own.values() for name, tensor in stage.body.named_buffers()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if holdings.place in holdings.holders[name]:
            if name not in found:
                tensor.data = tensor.data.to(pipeline._accelerator.device)
            pipeline._adopt(name, found.get(name, tensor), name in saved)


def _refuse_twice(chain: stages.Chain, schedule: str, size: int) -> None:
    """Refuse a parameter in two stages of one rank, of which FSDP would make two."""
    used = Counter(
        (_place(schedule, number, size), name) for number, names in enumerate(chain.names) for name in names
    )
    for (place, name), count in used.items():
        if count > 1:
            raise ValueError(
                f"schedule={schedule!r} with FSDP gives place {place} of the pipeline two stages that use one parameter, {name!r}, which FSDP would shard twice. Take a schedule "
                "with one stage on each rank, such as '1F1B', or untie it."
            )


def _shard(accelerator: Facade, stage: stages.Stage) -> None:
    """Shard a stage as one unit, which stays whole from its first forward of a batch to its last backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = accelerator.state.fsdp_plugin.mixed_precision_policy or MixedPrecisionPolicy()
    mesh = shard_mesh(accelerator.parallelism_config, accelerator.torch_device_mesh)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _connect(pipeline: Pipeline, holdings: Holdings, mesh: Any) -> None:
    """Make the process groups of what several ranks have. All ranks, also those of other pipelines."""
    columns = mesh.mesh.movedim(mesh.mesh_dim_names.index("pp"), -1).reshape(-1, len(holdings.ranks)).tolist()
    made: dict[tuple[int, ...], Any] = {tuple(range(len(holdings.ranks))): holdings.group}
    for name, places in holdings.holders.items():
        if len(places) > 1 and places not in made:
            for column in columns:
                group = dist.new_group([column[place] for place in places])
                if column == list(holdings.ranks):
                    made[places] = group
        if len(places) > 1:
            pipeline._groups[name] = made[places]
