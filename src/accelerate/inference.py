"""Pipeline-parallel inference: a model cut into stages, one per process, that micro-batches flow through."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from accelerate.offload.device_map import infer_auto_device_map
from accelerate.offload.sizes import calculate_maximum_sizes
from accelerate.process import PartialState
from accelerate.utils.operations import (
    copy_tensor_to_devices,
    ignorant_find_batch_size,
    pad_input_tensors,
    send_to_device,
)

# Room that a stage has beyond an even share of the model, since layers are placed whole.
_STAGE_MARGIN = 1.1


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
        no_split_module_classes: Names of classes whose instances stay in one stage.
        max_memory: The most that each stage may take. None: an even share of the model, and a tenth.
    """
    if num_processes == 1:
        return infer_auto_device_map(model, no_split_module_classes=no_split_module_classes, clean_result=False)
    if max_memory is None:
        total, (largest, _) = calculate_maximum_sizes(model)
        share = math.ceil(total * _STAGE_MARGIN / num_processes)
        max_memory = dict.fromkeys(range(num_processes), share)
        # The planner keeps room for the largest layer on the first device, and the last stage takes what is left.
        max_memory[0] += largest
        max_memory[num_processes - 1] = max(share, total)
    return infer_auto_device_map(
        model, max_memory=max_memory, no_split_module_classes=no_split_module_classes, clean_result=False
    )


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the batch size of the first argument that has one: the length of the first dimension of its tensors.

    Args:
        args: Positional arguments of a forward.
        kwargs: Keyword arguments of it.

    Returns:
        The batch size, or None if no argument holds a tensor with a dimension.
    """
    for value in [*(args or ()), *(kwargs or {}).values()]:
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            continue
        size = ignorant_find_batch_size(value)
        if size is not None:
            return size
    return None


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Cut a model into stages and return the schedule that runs this process's stage. Every rank must call.

    Args:
        model: The model, with its weights on the CPU.
        split_points: Names of the modules that each stage after the first begins with.
        args: Example positional arguments of one whole batch.
        kwargs: Example keyword arguments of one whole batch.
        num_chunks: Number of micro-batches that a batch is split into.

    Returns:
        A ``torch.distributed.pipelining.ScheduleGPipe``.

    Source:
        https://docs.pytorch.org/docs/stable/distributed.pipelining.html
    """
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    state = PartialState()
    # Stages exchange micro-batches, so their shapes are those that tracing has to see.
    micro_args = _first_chunk(tuple(args), num_chunks)
    micro_kwargs = _first_chunk(dict(kwargs or {}), num_chunks)
    pipe = pipeline(
        model,
        mb_args=micro_args,
        mb_kwargs=micro_kwargs,
        split_spec=dict.fromkeys(split_points, SplitPoint.BEGINNING),
    )
    stage = pipe.build_stage(state.process_index, device=state.device)
    return ScheduleGPipe(stage, num_chunks)


def _first_chunk(value: Any, num_chunks: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[: max(1, value.shape[0] // num_chunks)] if value.dim() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_first_chunk(item, num_chunks) for item in value)
    if isinstance(value, Mapping):
        return {key: _first_chunk(item, num_chunks) for key, item in value.items()}
    return value


def pippy_forward(forward: Callable, num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run one batch through the pipeline. Every rank must call; the first one's inputs count.

    Args:
        forward: The schedule's ``step``.
        num_chunks: Number of micro-batches; the batch is padded to a multiple of it, by repeating its last sample.
        gather_output: Send the output, which the last process has, to all.
        *args: Positional inputs.
        **kwargs: Keyword inputs.

    Returns:
        The output on the last rank, and on all with ``gather_output``; else None.
    """
    state = PartialState()
    size = find_pippy_batch_size(args, kwargs)
    if state.process_index == 0:
        if size is None:
            raise ValueError(
                "The first process got no tensor to find a batch size from; give the model its inputs there."
            )
        if size % num_chunks:
            args = pad_input_tensors(args, size, num_chunks)
            kwargs = pad_input_tensors(kwargs, size, num_chunks)
        args, kwargs = send_to_device(args, state.device), send_to_device(kwargs, state.device)
        output = forward(*args, **kwargs)
    else:
        output = forward()
    if gather_output:
        output = copy_tensor_to_devices(output)
    return _without_padding(output, size, num_chunks)


def _without_padding(output: Any, size: int | None, num_chunks: int) -> Any:
    """Drop the rows that padding added, where the caller's own inputs say how many there were."""
    if size is None or size % num_chunks == 0 or not isinstance(output, torch.Tensor) or output.dim() == 0:
        return output
    padded = math.ceil(size / num_chunks) * num_chunks
    return output[:size] if output.shape[0] == padded else output


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | Literal["auto"] = "auto",
    no_split_module_classes: Sequence[str] | str | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Make a model run as a pipeline over all processes, for inference. Every rank must call.

    Args:
        model: The model on the CPU; its forward has to be one graph that ``torch.export`` can trace.
        split_points: Names of the modules that each stage after the first begins with. ``"auto"``: stages of equal size.
        no_split_module_classes: For ``"auto"``, names of classes whose instances stay in one stage.
        example_args: Positional inputs of one batch. Later batches have the same shape, up to padding.
        example_kwargs: Keyword inputs of one batch.
        num_chunks: Number of micro-batches a batch is split into. None: the number of processes.
        gather_output: Give every process the output, not only the last.

    Returns:
        The same model, whose forward runs the pipeline; ``hf_split_points`` says where it was cut.

    Raises:
        ValueError: No process group exists, or a stage got no module.
    """
    state = PartialState()
    if not torch.distributed.is_initialized():
        raise ValueError("A pipeline needs several processes: start the script with `accelerate launch` or torchrun.")
    example_args = send_to_device(tuple(example_args), "cpu")
    example_kwargs = send_to_device(dict(example_kwargs or {}), "cpu")
    chunks = state.num_processes if num_chunks is None else num_chunks
    if split_points == "auto":
        split_points = _automatic_split(model, state.num_processes, no_split_module_classes)
    elif isinstance(split_points, str):
        split_points = [split_points]
    model.hf_split_points = list(split_points)
    size = find_pippy_batch_size(example_args, example_kwargs)
    if size is None:
        raise ValueError("Give `example_args` or `example_kwargs` with a tensor whose first dimension is the batch.")
    if size % chunks:
        example_args = pad_input_tensors(example_args, size, chunks)
        example_kwargs = pad_input_tensors(example_kwargs, size, chunks)
    schedule = build_pipeline(model, model.hf_split_points, example_args, example_kwargs, chunks)
    model._original_forward = model.forward
    model.pippy_stage = schedule

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return pippy_forward(schedule.step, chunks, gather_output, *args, **kwargs)

    model.forward = functools.update_wrapper(forward, model._original_forward)
    return model


def _automatic_split(model: nn.Module, stages: int, no_split: Sequence[str] | str | None) -> list[str]:
    names = [no_split] if isinstance(no_split, str) else no_split
    device_map = generate_device_map(model, stages, no_split_module_classes=names)
    points = [
        next((name for name, device in device_map.items() if device == stage), None) for stage in range(1, stages)
    ]
    if None in points:
        raise ValueError(
            f"The model cannot be cut into {stages} stages (the cut was {device_map}). Use fewer processes, or give "
            "`split_points`."
        )
    return points
