"""Pipeline-parallel inference: a model cut into stages, one per process, that micro-batches flow through."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from accelerate import comm
from accelerate.base.nested import find_batch_size
from accelerate.comm.operations import send_to_device
from accelerate.extensions.big_models.device_map import infer_auto_device_map
from accelerate.extensions.pipeline.balance import even_stages
from accelerate.process import PartialState


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> dict[str, int | str]:
    """Return a device map whose devices are pipeline stages of about equal size.

    Args:
        model: The model; its tensors may be on the meta device.
        num_processes: Number of stages. One: everything on the CPU.
        no_split_module_classes: Names of classes whose instances stay in one stage. None: what ``_no_split_modules`` of a
            transformers model says.
        max_memory: The most that each of several stages may take, as for `infer_auto_device_map`. None: the largest stage is
            as small as can be.

    Returns:
        Module name to stage.

    Raises:
        ValueError: The model has fewer modules than there are stages, or there is no stage.

    Example:
        >>> generate_device_map(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
        {'0': 0, '1': 1}
    """
    if num_processes < 1:
        raise ValueError(
            f"num_processes={num_processes}: a model has at least one stage. Give the number of processes."
        )
    if num_processes == 1 or max_memory is not None:
        budgets = None if num_processes == 1 else max_memory
        return infer_auto_device_map(
            model, max_memory=budgets, no_split_module_classes=no_split_module_classes, clean_result=False
        )
    stages = even_stages(model, num_processes, no_split_module_classes)
    return {name: number for number, units in enumerate(stages) for unit in units for name in unit.names}


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the batch size of the first argument that has one: the length of the first dimension of its tensors.

    Args:
        args: Positional arguments of a forward.
        kwargs: Keyword arguments of it.

    Returns:
        The batch size, or None if no argument holds a tensor with a dimension.

    Example:
        >>> find_pippy_batch_size((torch.ones(3, 2),), {})
        3
    """
    for value in [*(() if args is None else args), *(kwargs or {}).values()]:
        scalar = isinstance(value, torch.Tensor) and value.dim() == 0
        if not scalar and (size := ignorant_find_batch_size(value)) is not None:
            return size
    return None


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Cut a model into stages and return the schedule that runs this process's stage.

    Collective: call on every rank.

    Args:
        model: The model, whose weights have values, the same on every rank.
        split_points: Names of the modules that each stage after the first begins with.
        args: Positional arguments of one micro-batch.
        kwargs: Keyword arguments of one micro-batch.
        num_chunks: Most micro-batches in flight at a time.

    Returns:
        A ``torch.distributed.pipelining.ScheduleGPipe`` whose ``step`` takes the model's arguments for any number of samples
        on the first rank, and returns the model's output on the last one.

    Raises:
        ValueError: On every rank, if the model cannot be cut on one of them, or if the arguments of the ranks differ.

    Source:
        https://docs.pytorch.org/docs/stable/distributed.pipelining.html
    """
    # Takes a second to import, which only pipelines have to spend.
    from accelerate.extensions.inference.schedule import PipelineSchedule
    from accelerate.extensions.pipeline.stages import trace

    state = PartialState()
    schedule = error = None
    settings: dict[str, Any] = {}
    try:
        if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1:
            raise ValueError(f"num_chunks={num_chunks!r}: give the number of micro-batches, at least 1.")
        empty = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
        if empty:
            raise ValueError(
                f"{empty[0]!r} is on the meta device: load the model's weights before it becomes a pipeline."
            )
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        args, kwargs = send_to_device(tuple(args), device), send_to_device(dict(kwargs or {}), device)
        traced = trace(model, split_points, args, kwargs, state.num_processes, state.device, trains=False)
        schedule = PipelineSchedule(traced, num_chunks)
        shapes = [(leaf.name, leaf.shape, str(leaf.dtype), repr(leaf.value)) for leaf in traced.inputs.leaves]
        settings = {"split_points": list(split_points), "num_chunks": num_chunks, "example": shapes}
    except Exception as caught:
        error = caught
    _check_same_arguments(settings, error)
    return schedule


def _check_same_arguments(settings: Mapping[str, Any], error: Exception | None) -> None:
    """Raise on every rank if one of them failed, or was given something else than the first.

    Collective: call on every rank.
    """
    everything = comm.current().gather_object(settings if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, value in enumerate(everything):
        if isinstance(value, str):
            raise ValueError(f"Rank {rank} cannot build its stage of the pipeline, so no rank can. {value}")
    for rank, value in enumerate(everything):
        for name, local_value in value.items():
            if local_value != everything[0][name]:
                raise ValueError(
                    f"The ranks build different pipelines: {name} is {local_value} on rank {rank} and {everything[0][name]} on rank 0. Give "
                    "every rank the same."
                )


def pippy_forward(forward: Callable, num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run one batch through the pipeline. Every rank must call; the first one's inputs count.

    Args:
        forward: The ``step`` of what `build_pipeline` returned.
        num_chunks: As `build_pipeline` was given.
        gather_output: Send the output, which the last process has, to all.
        *args: Positional inputs: any number of samples, else like the example. Only the first rank needs them.
        **kwargs: Keyword inputs.

    Returns:
        The output on the last rank, and on all with ``gather_output``; else None.

    Raises:
        ValueError: On every rank, if the inputs differ from the example by more than the number of samples.
    """
    schedule = forward.__self__
    if num_chunks != schedule.num_chunks:
        raise ValueError(
            f"num_chunks={num_chunks}, but the pipeline was built for {schedule.num_chunks}. Build it again with that number."
        )
    output = forward(*args, **kwargs)
    return schedule.to_all(output) if gather_output else output


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | Literal["auto"] = "auto",
    no_split_module_classes: Sequence[str] | str | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Make a model run as a pipeline over all processes, for inference.

    The first rank gives a batch to the model, the last one gets the output. A batch is cut into micro-batches of as many
    samples as the example has, which are in flight at the same time.

    Collective: call on every rank.

    Args:
        model: The model, with the same weights on every rank; its forward has to be one graph that ``torch.export`` can trace.
        split_points: Names of the modules that each stage after the first begins with. ``"auto"``: stages of equal size.
        no_split_module_classes: For ``"auto"``, names of classes whose instances stay in one stage.
        example_args: Positional inputs of one micro-batch. Later inputs may have any number of samples. Otherwise they have the
            same shapes and dtypes, and the same values of other objects.
        example_kwargs: Keyword inputs of it.
        num_chunks: Most micro-batches in flight at a time; more samples take several runs. None: the number of processes.
        gather_output: Give every process the output, not only the last.

    Returns:
        The same model, whose forward runs the pipeline; ``hf_split_points`` says where it was cut, and ``pippy_stage`` is the
        schedule of this process's stage.

    Raises:
        ValueError: No process group exists; the model cannot be cut or traced; the example has no batch dimension. All but
            the first are raised on every rank, and the model is not changed.

    Example:
        >>> model = prepare_pippy(model, example_args=(batch[:2],), gather_output=True)  # doctest: +SKIP
        >>> output = model(batch)  # doctest: +SKIP
    """
    state = PartialState()
    if not torch.distributed.is_initialized():
        raise ValueError("A pipeline needs several processes: start the script with `accelerate launch` or torchrun.")
    if "_original_forward" in model.__dict__:  # an earlier pipeline: the model itself is traced
        model.forward = model._original_forward
        for name in ("_original_forward", "pippy_stage", "hf_split_points"):
            model.__dict__.pop(name, None)
    chunks = state.num_processes if num_chunks is None else num_chunks
    points, error = [], None
    try:
        if isinstance(example_args, torch.Tensor):
            raise ValueError("example_args is a tensor; give a tuple with the positional inputs, such as (tensor,).")
        if isinstance(split_points, str) and split_points == "auto":
            kept = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes
            points = [units[0].module for units in even_stages(model, state.num_processes, kept)[1:]]
        else:
            points = [split_points] if isinstance(split_points, str) else list(split_points)
    except Exception as caught:
        error = caught
    _check_same_arguments({}, error)
    schedule = build_pipeline(model, points, example_args, example_kwargs, chunks)
    model.hf_split_points = points
    model._original_forward = model.forward
    model.pippy_stage = schedule
    forward = functools.partial(pippy_forward, schedule.step, chunks, gather_output)
    model.forward = functools.update_wrapper(forward, model._original_forward)
    return model


def ignorant_find_batch_size(data: Any) -> int | None:
    """Do what `find_batch_size` does, but return None where that fails."""
    try:
        return find_batch_size(data)
    except (IndexError, TypeError, ValueError):
        return None
