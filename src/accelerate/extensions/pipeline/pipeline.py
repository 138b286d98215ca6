"""Pipelines that train: a model's stages over the ranks of the mesh's dimension `pp`, and the schedule that micro-batches follow."""

import contextlib
import functools
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
from accelerate.base.nested import send_to_device
from accelerate.base.versions import is_torch_version
from accelerate.checkpoint.model_io import io_of
from accelerate.checkpoint.state import run_on_all_ranks
from accelerate.config.enums import DynamoBackend
from accelerate.extensions.pipeline import stages
from accelerate.extensions.pipeline.balance import costly_stages
from accelerate.extensions.same_model import consistency
from accelerate.extensions.unsharded.averaging import average_gradients
from accelerate.precision import master
from accelerate.runtime.torch_private import local_part, pytree
from accelerate.strategies.mesh import check_layout, shard_mesh, submesh
from accelerate.training import gradients, prepare
from accelerate.training.run import TrainingRun

# How many stages each rank has.
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
# The state of gradients after an earlier exchange: a parameter of several ranks already has the sum.
_SUMMED = "_accelerate_summed"


@dataclass
class _Batch:
    """The batch that is under way: how its rows count, and what has come out so far."""

    rows: int
    micro_rows: int
    target: Any
    factor: float
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def samples(self, number: int) -> int:
        """Return how many samples of a micro-batch are the user's; the others fill it."""
        return min(max(self.rows - number * self.micro_rows, 0), self.micro_rows)

    def target_of(self, number: int) -> Any:
        """Return the part of the target that belongs to a micro-batch; of one without samples, that of what fills it."""
        start = min(number * self.micro_rows, self.rows - 1)
        stop = start + max(self.samples(number), 1)
        return pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor[start:stop] if tensor.ndim else tensor, self.target
        )


@dataclass(frozen=True)
class Holdings:
    """The ranks of a pipeline that have each parameter and buffer, by the names of the user's model.

    Attributes:
        tensors: Of the full model, each once, on the meta device.
        holders: Positions in the pipeline that have each of them, in order.
        place: This rank's position in the pipeline.
        ranks: The ranks of this pipeline, and their process group.
        ties: Groups of names that mean one parameter.
        elsewhere: Names in the full model's state that this rank's part does not have.
    """

    tensors: Mapping[str, torch.Tensor]
    holders: Mapping[str, tuple[int, ...]]
    place: int
    ranks: Sequence[int]
    group: Any
    ties: list[list[str]]
    elsewhere: frozenset[str]

    @functools.cached_property
    def repeated(self) -> list[str]:
        """The names of this rank's tensors that an earlier rank also has."""
        return [name for name, places in self.holders.items() if self.place in places[1:]]

    def make_groups(self) -> dict[str, Any]:
        """Return the process group of each tensor that this rank and others of its pipeline have. The ranks that have it."""
        shared = sorted({places for places in self.holders.values() if len(places) > 1 and self.place in places})
        # One group a set of places, whatever the number of pipelines: no rank waits for those of another one.
        groups = {
            places: self.group if len(places) == len(self.ranks) else comm.group_of([self.ranks[at] for at in places])
            for places in shared
        }
        return {name: groups[places] for name, places in self.holders.items() if places in groups}

    def shared(self, part: nn.Module, groups: Mapping[str, Any]) -> Iterator[tuple[nn.Parameter, int, Any]]:
        """Yield the trainable parameters of this rank's part that others have, too: each with their number and their group."""
        parameters = dict(part.named_parameters())
        for name, group in groups.items():
            if name in parameters and parameters[name].requires_grad:
                yield parameters[name], len(self.holders[name]), group


class Pipeline(nn.Module):
    """This rank's stages of a model that trains as a pipeline, with the parameters under the names of the user's model.

    ``Accelerator.prepare_pipeline`` makes it. A call takes a full batch of this data-parallel rank, the same on all ranks of the
    pipeline. It runs forward and backward, and returns the loss on each of them: the mean over the samples, detached. In
    evaluation, or under ``torch.no_grad``, there is no backward. A pipeline with a `loss` that is called without a `target`
    returns the model's output.

    Attributes:
        holdings: Which ranks have which parameters.
    """

    _batch: _Batch  # only during a call

    def __init__(
        self,
        accelerator: TrainingRun,
        traced: stages.Traced,
        loss: Callable[..., torch.Tensor] | None,
        schedule: str,
        microbatches: int,
        local_stages: Mapping[int, stages.Stage],
        holdings: Holdings,
        groups: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._accelerator, self._own, self._microbatches, self._loss = accelerator, local_stages, microbatches, loss
        self.holdings, self._groups = holdings, groups
        # Not the chains, which have the weights of all stages.
        self._inputs, self._outputs = traced.inputs, traced.outputs
        self._held = False
        size, group, device = len(holdings.ranks), holdings.group, accelerator.device
        count = size * SCHEDULES[schedule]
        built = [
            PipelineStage(stage, at, count, device, stage.taken[True], stage.returned[True], group=group)
            for at, stage in local_stages.items()
        ]
        kind, schedule_stages = get_schedule_class(schedule), built if SCHEDULES[schedule] > 1 else built[0]
        # Each micro-batch has its weight already.
        self._schedule = kind(schedule_stages, microbatches, loss_fn=self._loss_of, scale_grads=False)
        self._owners = [holdings.ranks[_place(schedule, stage, size)] for stage in range(count)]
        self._is_last = count - 1 in local_stages

    def train(self, mode: bool = True) -> "Pipeline":
        """Let the stages compute as in training, or in evaluation."""
        for stage in self._own.values():
            stage.train(mode)
        return super().train(mode)

    @contextlib.contextmanager
    def no_sync(self, held: bool = True) -> Iterator[None]:
        """Keep gradients on their rank inside, except those that FSDP shards. With `held=False` exchange them within such a context."""
        before, self._held = self._held, held
        try:
            yield
        finally:
            self._held = before

    def trigger_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call that exchanges gradients also inside `no_sync`; it is the backward pass, too."""
        return self.no_sync(held=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a full batch through the pipeline.

        Collective: call on every rank.

        Args:
            *args: Arguments of the model, like the example's, with any number of samples up to that of all micro-batches.
            **kwargs: Keyword arguments of it; and ``target`` for a pipeline with a ``loss``, with as many samples.

        Raises:
            ValueError: The batch does not fit the example or the micro-batches; raised before anything is computed.
        """
        target = kwargs.pop("target", None) if self._loss is not None else None
        rows, tensors = self._inputs.match(args, kwargs)
        trains = self.training and torch.is_grad_enabled()
        if problem := self._misfit(rows, target, trains):
            raise ValueError(problem)
        device, inputs = self._accelerator.device, self._inputs
        factor = gradients.loss_factor(self._accelerator) if trains else 1.0
        local_target = send_to_device(target, device) if self._is_last else None
        batch = self._batch = _Batch(rows, inputs.rows, local_target, factor)
        micro_batches = inputs.cut(tensors, 0, self._microbatches, device) if 0 in self._own else ()
        if trains:
            self._divide_summed()
            # The loss is called with the number of the micro-batch in place of its target.
            self._schedule.step(*micro_batches, target=torch.arange(self._microbatches), return_outputs=False)
            if self._accelerator.sync_gradients and not self._held:
                self._exchange()
        else:
            self._forward_only(micro_batches)
        del self._batch
        if self._loss is not None and target is None:
            output = self._outputs.joined(batch.outputs, rows) if self._is_last else None
            return self._outputs.built(self._from_last(self._outputs.tensors(output, rows, device)))
        losses = [value.float() for value in batch.losses] or [torch.zeros((), device=device)]
        return self._from_last([torch.stack(losses).sum()])[0]

    def _from_last(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the last stage on all ranks of the pipeline, which give as many."""
        for tensor in tensors:
            dist.broadcast(tensor, self._owners[-1], group=self.holdings.group)
        return tensors

    @torch.no_grad()
    def _forward_only(self, micro_batches: Sequence[torch.Tensor]) -> None:
        """Send the micro-batches through the stages one after the other, in the same order on all ranks of the pipeline."""
        group, device, me = self.holdings.group, self._accelerator.device, self._accelerator.process_index
        sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        values: Sequence[torch.Tensor]
        results: Sequence[torch.Tensor] = ()
        pieces = list(zip(*(tensor.chunk(self._microbatches) for tensor in micro_batches), strict=True))
        for place in range(self._microbatches):
            for number, stage in self._own.items():
                if number == 0:
                    values = pieces[place]
                elif self._owners[number - 1] == me:
                    values = results
                else:
                    values = [torch.empty_like(value, device=device) for value in stage.taken[self.training]]
                    for value in values:
                        dist.recv(value, self._owners[number - 1], group=group)
                results = stage(*values)
                if number == len(self._owners) - 1:
                    self._loss_of(results, place)
                elif self._owners[number + 1] != me:
                    sent += [(dist.isend(value, self._owners[number + 1], group=group), value) for value in results]
        for work, _ in sent:
            if work is not None:
                work.wait()
        if self._accelerator.is_fsdp2:
            for stage in self._own.values():  # else the next forward would see these weights after a step
                stage.reshard()  # type: ignore[operator]  # an FSDPModule

    def _misfit(self, rows: int, target: Any, trains: bool) -> str | None:
        """Return the problem with the number of samples or the target, and its solution."""
        micro_rows, leaves = self._inputs.rows, pytree.tree_leaves(target)
        sizes = {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
        if rows > micro_rows * self._microbatches:
            return (
                f"The batch has {rows} samples, but {self._microbatches} micro-batches of {micro_rows} hold {micro_rows * self._microbatches}. Prepare the pipeline "
                f"with an example of {-(-rows // self._microbatches)} samples, or with more micro-batches."
            )
        if self._loss is None and rows % micro_rows:
            return (
                f"The batch has {rows} samples, which are no multiple of the {micro_rows} of a micro-batch, and the model computes the loss itself, also over the rows that fill "
                "the last one. Give `prepare_pipeline` a loss, or the loader drop_last=True."
            )
        if self._loss is not None and target is None and trains:
            return "A pipeline with a loss trains on a target: call it with target=..., next to the model's arguments."
        if target is not None and sizes != {rows}:
            return f"target has {sorted(sizes) or 'no'} samples, and the batch {rows}. Give tensors with one row for each sample."
        return None

    def _loss_of(self, outputs: Sequence[torch.Tensor], number: torch.Tensor | int) -> torch.Tensor:
        """Return what backward begins with for a micro-batch: its loss by the share of the batch's samples that it has."""
        batch, place = self._batch, int(number)
        count = batch.samples(place)
        if self._loss is None:
            loss = outputs[0]
        elif batch.target is None:
            batch.outputs.append(outputs)
            return outputs[0].new_zeros(())
        elif not count:  # nothing of it counts, and a mean over ignored targets is NaN
            loss = sum(output.sum() for output in outputs if output.is_floating_point()) * 0.0
        else:
            loss = self._loss(self._outputs.joined([outputs], count), batch.target_of(place))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(f"The loss is {loss!r}; return a tensor with one element, the mean over the samples.")
        share = loss.reshape(()) * (count / batch.rows)
        batch.losses.append(share.detach())
        return share * batch.factor

    # -- gradients -----------------------------------------------------------------------------------------------

    def _divide_summed(self) -> None:
        """Turn a sum over ranks back into a share, so that the next sum counts it once."""
        for parameter, count, _ in self.holdings.shared(self, self._groups):
            gradient = parameter.grad
            if gradient is not None and getattr(gradient, _SUMMED, False):
                gradient.div_(count)
                setattr(gradient, _SUMMED, False)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Sum the gradients of what several stages use, and average those of replicas.

        Collective: call on every rank.
        """
        for parameter, _, group in self.holdings.shared(self, self._groups):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_part(parameter.grad), group=group)
            setattr(parameter.grad, _SUMMED, True)
        mesh = self._accelerator.torch_device_mesh
        if not self._accelerator.is_fsdp2 and (replicas := submesh(mesh, "dp_replicate")) is not None:
            average_gradients(list(self.parameters()), replicas.get_group())


# -- preparing ---------------------------------------------------------------------------------------------------


def prepare_pipeline(
    accelerator: TrainingRun,
    model: nn.Module,
    schedule: str = "1F1B",
    microbatches: int | None = None,
    split: str | Sequence[str] = "auto",
    example_args: Sequence[Any] = (),
    example_kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> nn.Module:
    """Divide a model over the ranks of ``ParallelismConfig(pp_size=...)``, to train it as a pipeline.

    Make the optimizer from ``pipeline.parameters()``, and prepare it. A call of the pipeline takes a full batch of this
    data-parallel rank, the same on all ranks of the pipeline, such as a prepared loader's. It runs forward and backward, so
    do not call `backward`. Under FSDP each stage is one unit. The model is not changed; each rank moves the weights of its own
    stages to the device.

    Collective: call on every rank.

    Args:
        model: The model, with its weights; its forward has to be one graph that ``torch.export`` can trace.
        schedule: ``"GPipe"``, ``"1F1B"``, or with two stages on each rank ``"Interleaved1F1B"`` or ``"ZBVZeroBubble"``.
        microbatches: How many parts a full batch has; None: twice the ranks of the pipeline.
        split: Names of the modules that each stage after the first begins with, in their order. ``"auto"`` measures the blocks
            of the model and makes the most expensive stage as cheap as possible.
        example_args: Positional arguments of one micro-batch. Batches differ from it only in the number of samples.
        example_kwargs: Keyword arguments of it.
        loss: Called with the model's output for a micro-batch and its part of ``target``, an argument of the pipeline; it
            returns the mean over the samples. A batch may then have any number of samples. None: the model returns its loss.

    Returns:
        The pipeline, a module with this rank's parameters under the names of the model. A call returns the loss on every rank, the mean
        over the samples, detached.

    Raises:
        ValueError: The model cannot be divided, or the settings do not fit; raised on all ranks.

    Example:
        >>> pipeline = accelerator.prepare_pipeline(  # doctest: +SKIP
        ...     model, microbatches=4, example_args=(batch[:2],), loss=torch.nn.functional.cross_entropy
        ... )
        >>> optimizer, loader = accelerator.prepare(torch.optim.AdamW(pipeline.parameters()), loader)  # doctest: +SKIP
        >>> for batch, labels in loader:  # doctest: +SKIP
        ...     loss = pipeline(batch, target=labels)
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Source:
        https://docs.pytorch.org/docs/stable/distributed.pipelining.html
    """
    if microbatches is None:
        microbatches = 2 * getattr(accelerator.parallelism_config, "pp_size", 1)
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_pipeline() got model={model!r} ({type(model).__name__}); pass a torch.nn.Module.")
    if problem := _problem(accelerator, model, schedule, microbatches):
        raise ValueError(problem)
    check_layout(accelerator)
    accelerator._prepare_device_mesh()
    accelerator._strategy.check(accelerator, ())
    part: Any = submesh(accelerator.torch_device_mesh, "pp")  # a DeviceMesh: pp_size is above 1
    size, count = part.size(), part.size() * SCHEDULES[schedule]
    consistency.require_same_model(accelerator, model)
    if accelerator.is_fsdp2 and accelerator.mixed_precision != "no":
        master.upcast(model)

    def divided() -> tuple[list[str], stages.Traced]:
        args, kwargs = send_to_device(
            (tuple(example_args), dict(example_kwargs or {})), next(model.parameters()).device
        )
        points = costly_stages(model, count, lambda: model(*args, **kwargs)) if split == "auto" else split
        points = [points] if isinstance(points, str) else list(points)
        record = _only_loss if loss is None else None
        return points, stages.trace(model, points, args, kwargs, count, accelerator.device, record)

    points, traced = run_on_all_ranks(divided)
    settings = points, schedule, microbatches, [str(leaf) for leaf in traced.inputs.leaves]
    if not comm.current().is_same(settings):
        raise ValueError(
            f"The ranks build different pipelines; this one has split={points}, schedule={schedule!r}, microbatches={microbatches} and an example of "
            f"{', '.join(settings[3])}. Give every rank the same."
        )
    holdings = _holdings(model, traced.chains, schedule, part)
    numbers = [number for number in range(count) if _place(schedule, number, size) == holdings.place]
    local_stages = {at: stages.build(traced.chains, at, accelerator.autocast).to(accelerator.device) for at in numbers}
    if accelerator.is_fsdp2:
        _shard(accelerator, local_stages)
    groups = holdings.make_groups()
    arguments = accelerator, traced, loss, schedule, microbatches, local_stages, holdings, groups
    pipeline = run_on_all_ranks(lambda: Pipeline(*arguments))
    _fill(pipeline, model, local_stages)
    return prepare.register(accelerator, "model", pipeline, model)


def _place(schedule: str, stage: int, size: int) -> int:
    """Return which place of the pipeline has a stage: those of ZBV run to the last one and back."""
    return 2 * size - 1 - stage if schedule == "ZBVZeroBubble" and stage >= size else stage % size


def _problem(accelerator: TrainingRun, model: nn.Module, schedule: str, microbatches: Any) -> str | None:
    """Return why a model or the settings have no pipeline, and the solution."""
    name, size = type(model).__name__, getattr(accelerator.parallelism_config, "pp_size", 1)
    least = {"GPipe": 1, "1F1B": size, "Interleaved1F1B": size, "ZBVZeroBubble": 2 * size - 1}.get(schedule, 1)
    multiple = size if schedule == "Interleaved1F1B" else 1
    compiler = accelerator.state.dynamo_plugin.backend
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    batch = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    norms = [
        at for at, part in model.named_modules() if isinstance(part, batch) and (part.training or not model.training)
    ]
    if size == 1:
        return "There are no ranks to divide the model over: pass parallelism_config=ParallelismConfig(pp_size=2), and launch as many processes."
    if is_torch_version("<", "2.10"):
        return "Pipelines train with torch 2.10 or newer. Run pip install 'torch>=2.10'."
    if accelerator.prepared.find(model):
        return f"This {name} is prepared already. Use what that returned, or call free_memory() first."
    if schedule not in SCHEDULES:
        return f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}."
    if type(microbatches) is not int or microbatches < least or microbatches % multiple:
        return f"microbatches={microbatches!r} does not fit schedule={schedule!r} over pp_size={size}: give a whole number of at least {least}, a multiple of {multiple}."
    if compiler is not DynamoBackend.NO:
        return f"dynamo_backend={compiler} with pp_size={size}: stages are not compiled. Leave the backend out."
    if empty:
        return f"{empty[0]!r} of {name} is on the meta device. Load the weights before the model becomes a pipeline."
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return f"{name} has no trainable parameter. Use prepare_model(model, evaluation_mode=True)."
    if norms:
        return (
            f"{norms[0]!r} of {name} normalises over the batch, and would see one micro-batch at a time: another model than in one process. "
            "Use a normalisation of each sample, or freeze it: `model.train()`, then `.eval()` of the part."
        )
    return None


def _only_loss(output: Any) -> tuple[torch.Tensor, ...]:
    """Return the loss that a model returns: the output itself, its entry or attribute `loss`, or its first element."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, (list, tuple)) and loss else loss
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ValueError(
            f"The model returns {type(output).__name__} without a loss, a tensor of one element (found: {getattr(loss, 'shape', loss)}). Give the example the inputs that the model "
            "computes it from (`labels`), or give `prepare_pipeline` a loss."
        )
    return (loss.reshape(()),)


def _holdings(model: nn.Module, chains: Mapping[bool, stages.Chain], schedule: str, part: Any) -> Holdings:
    tensors = {
        name: tensor.detach().to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    ranks = dist.get_process_group_ranks(part.get_group())
    used = [numbered_stage for chain in chains.values() for numbered_stage in enumerate(chain.names)]
    users = [(name, _place(schedule, stage, len(ranks))) for stage, names in used for name in names]
    # The first rank keeps tensors that no stage uses.
    holders = {name: tuple(sorted({place for user, place in users if user == name})) or (0,) for name in tensors}
    place = part.get_local_rank()
    elsewhere = frozenset(model.state_dict()) - {name for name, places in holders.items() if place in places}
    return Holdings(tensors, holders, place, ranks, part.get_group(), io_of(model).tied_names(model), elsewhere)


def _fill(pipeline: Pipeline, model: nn.Module, local_stages: Mapping[int, stages.Stage]) -> None:
    """Give the pipeline this rank's tensors under their full names: those of its stages, and those that no stage uses."""
    saved = model.state_dict()
    tensors = {name: tensor for stage in local_stages.values() for name, tensor in stage.tensors().items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if pipeline.holdings.place not in pipeline.holdings.holders[name]:
            continue
        if name not in tensors:
            tensor.data = tensor.data.to(pipeline._accelerator.device)
        *path, last = name.split(".")
        owner: nn.Module = pipeline
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        entry = tensors.get(name, tensor)
        if isinstance(entry, nn.Parameter):
            owner.register_parameter(last, entry)
        else:
            owner.register_buffer(last, entry, name in saved)


def _shard(accelerator: TrainingRun, local_stages: Mapping[int, stages.Stage]) -> None:
    """Shard each stage as one unit, which stays gathered from its first forward of a batch to its last backward.

    Collective: call on every rank.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    use_counts = Counter(
        name
        for stage in local_stages.values()
        for name, tensor in stage.tensors().items()
        if isinstance(tensor, nn.Parameter)
    )
    twice = [name for name, count in use_counts.items() if count > 1]
    if shared_names := [name for names in comm.current().gather_object(twice) for name in names]:
        raise ValueError(
            f"FSDP cannot shard {shared_names[0]!r}, which two stages of one rank use: it would make two of it. Take a schedule with one stage on each rank, such as '1F1B', or "
            "untie it."
        )
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy or MixedPrecisionPolicy()
    mesh = shard_mesh(accelerator.parallelism_config, accelerator.torch_device_mesh)  # type: ignore[arg-type]  # pp_size is set
    for stage in local_stages.values():
        fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
