"""A model cut into stages by tracing it, one for each process, and the schedule that sends batches of any size through them.

Torch's pipeline takes one micro-batch as its example and returns flat outputs. Around it, this module knows the arguments
that a model is called with and the structure that it returns, and cuts batches so that every micro-batch has the shape of
the example.
"""

import contextlib
import difflib
import inspect
import math
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from accelerate import comm
from accelerate.process import PartialState
from accelerate.runtime.torch_private import exporting_by_running, pytree

# What may be an input or an output beside tensors: it is part of the traced graph.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_REFUSED = -1


def _label(path: Sequence[Any]) -> str:
    """Name a value in nested arguments: ``attention_mask`` or ``states[0]``."""
    first = path[0] if path else ""
    name = getattr(first, "key", getattr(first, "idx", getattr(first, "name", first)))
    return f"{name}{pytree.keystr(tuple(path[1:]))}"


@dataclass
class _Leaf:
    """A value in the example or the output: shape and dtype of a tensor of one micro-batch, or a constant."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    value: Any = None

    def __str__(self) -> str:
        kind = f"={self.value!r}" if self.shape is None else f" of shape {self.shape}, {self.dtype}"
        return f"{self.name}{kind}"


def _leaf(name: str, value: Any) -> _Leaf:
    if isinstance(value, torch.Tensor):
        return _Leaf(name, tuple(value.shape), value.dtype)
    return _Leaf(name, None, type(value), value)  # 1, 1.0 and True are equal, but other constants


class Inputs:
    """The arguments (of `rows` samples) that a model is traced with; brings those of a batch into their form."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._owner = type(model).__name__
        self._signature = inspect.signature(model.forward)
        values, self._structure = self._flat(args, kwargs, "`example_args` and `example_kwargs`")
        self.leaves = [_leaf(name, value) for name, value in values]
        for leaf in self.leaves:
            if leaf.shape is None and not isinstance(leaf.value, _CONSTANTS):
                raise ValueError(
                    f"{leaf.name} of the example is a {type(leaf.value).__name__}, which a pipeline cannot cut into "
                    "micro-batches. Leave it out, or give tensors, numbers, strings, and lists, tuples and dictionaries of them."
                )
        self.rows = next((leaf.shape[0] for leaf in self.leaves if leaf.shape), 0)
        if not self.rows:
            raise ValueError(
                "No tensor of `example_args` and `example_kwargs` has a batch dimension with a sample in it (seen: "
                f"{', '.join(str(leaf) for leaf in self.leaves) or 'no values'}). Give tensors whose first dimension is the batch."
            )
        self._example = [value for _, value in values if isinstance(value, torch.Tensor)]

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any], called: str) -> tuple[list[tuple[str, Any]], Any]:
        """Return the values in some arguments, each with its name, and the structure around them."""
        try:
            arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{called} do not fit {self._owner}.forward{self._signature}: {error}.") from None
        paths, structure = pytree.tree_flatten_with_path(arguments)
        return [(_label(path), value) for path, value in paths], structure

    def traced(self) -> tuple[torch.Tensor, ...]:
        """Return the example's tensors as the traced graph takes them, once: all have a dimension to cut."""
        example, self._example = self._example, []
        # Tensors that are one object in the example would be one input of the graph.
        return tuple(tensor.detach().reshape(tensor.shape or (1,)) for tensor in example)

    def call(self, forward: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Call a forward with the example's arguments, but other tensors, in the form that `traced` returns."""
        given = iter(tensors)
        values = [
            leaf.value if leaf.shape is None else next(given) if leaf.shape else next(given).reshape(())
            for leaf in self.leaves
        ]
        bound = inspect.BoundArguments(self._signature, pytree.tree_unflatten(values, self._structure))
        return forward(*bound.args, **bound.kwargs)

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, list[tuple[torch.Tensor, bool]]]:
        """Return the samples of a batch, and each tensor with whether it holds them; refuse other arguments."""
        values, structure = self._flat(args, kwargs, "The arguments on the first process")
        rows = next((value.shape[0] for _, value in values if isinstance(value, torch.Tensor) and value.dim()), 0)
        if not rows:
            raise ValueError(
                f"The first process got no sample (arguments: {', '.join(str(_leaf(*value)) for value in values) or 'none'}). "
                "Give the model its inputs there: tensors whose first dimension is the batch."
            )
        if structure != self._structure:
            raise ValueError(
                f"The pipeline was traced with {', '.join(leaf.name for leaf in self.leaves)}, and is called with "
                f"{', '.join(name for name, _ in values)}. Give the arguments of the example, or call `prepare_pippy` again."
            )
        return rows, [
            self._compared(leaf, _leaf(*value), value[1], rows)
            for leaf, value in zip(self.leaves, values, strict=True)
            if leaf.shape is not None or _leaf(*value) != leaf
        ]

    def _compared(self, leaf: _Leaf, found: _Leaf, value: Any, rows: int) -> tuple[torch.Tensor, bool]:
        """Return a tensor of a batch, and whether it holds the samples; another one is the same for every micro-batch."""
        if leaf.shape is not None and found.dtype == leaf.dtype:
            if leaf.shape[:1] == (self.rows,) and found.shape == (rows, *leaf.shape[1:]):
                return value, True
            if found.shape == leaf.shape:
                return value.reshape(leaf.shape or (1,)), False
        raise ValueError(
            f"{found} in a batch of {rows}, but the pipeline was traced with {leaf} for a micro-batch of {self.rows}. Only the "
            "number of samples may differ: convert or pad it, or call `prepare_pippy` again with an example like this."
        )

    def cut(self, tensors: Sequence[tuple[torch.Tensor, bool]], start: int, count: int) -> tuple[torch.Tensor, ...]:
        """Return `count` micro-batches from a sample on, all in one; the last sample fills the last of them."""
        wanted = count * self.rows
        taken = []
        for tensor, holds_samples in tensors:
            if holds_samples:
                piece = tensor[start : start + wanted]
                if piece.shape[0] < wanted:
                    piece = torch.cat([piece, piece[-1:].expand(wanted - piece.shape[0], *piece.shape[1:])])
            else:
                piece = torch.cat([tensor] * count)
            taken.append(piece)
        return tuple(taken)


class Outputs:
    """What a model returns: its structure, and for each tensor in it how many rows belong to a sample."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._structure: Any = None
        self._leaves: list[_Leaf] = []

    def record(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Note the structure of one micro-batch's output; return its tensors. ValueError if one has no samples."""
        paths, self._structure = pytree.tree_flatten_with_path(output)
        self._leaves = [_leaf(_label(path) or "it", self._constant(_label(path), value)) for path, value in paths]
        for leaf in self._leaves:
            if leaf.shape is not None and (not leaf.shape or leaf.shape[0] % self._rows):
                raise ValueError(
                    f"The model returns {leaf.name} of shape {leaf.shape} for a micro-batch of {self._rows}: there is no batch "
                    "dimension. Leave out what it is computed from (such as `labels`), or return a value for each sample."
                )
        return tuple(value for _, value in paths if isinstance(value, torch.Tensor))

    @staticmethod
    def _constant(name: str, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, *_CONSTANTS)):
            return value
        if not hasattr(value, "get_seq_length"):
            raise ValueError(
                f"The model returns a {type(value).__name__} ({name}), which cannot be divided. Return tensors in lists, "
                "tuples, dictionaries or dataclasses that `torch.export.register_dataclass` knows."
            )
        return None  # a cache of transformers

    def joined(self, pieces: Sequence[Sequence[torch.Tensor]], samples: int) -> Any:
        """Return what the model returns for a batch, from the tensors of each run of the schedule."""
        columns = [column[0] if len(column) == 1 else torch.cat(column) for column in zip(*pieces, strict=True)]
        shapes = self.shapes(samples)
        return self.built([column[: shape[0]] for column, (shape, _) in zip(columns, shapes, strict=True)])

    def shapes(self, samples: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor for so many samples."""
        return [
            ((leaf.shape[0] // self._rows * samples, *leaf.shape[1:]), leaf.dtype)
            for leaf in self._leaves
            if leaf.shape is not None
        ]

    def built(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return tensors in the structure of the model's output."""
        given = iter(tensors)
        values = [leaf.value if leaf.shape is None else next(given) for leaf in self._leaves]
        return pytree.tree_unflatten(values, self._structure)


@dataclass
class Traced:
    """A model as stages: torch's `Pipe`, and the positions of the inputs that the first stage takes (`used`)."""

    pipe: Any
    inputs: Inputs
    outputs: Outputs
    used: list[int] = field(default_factory=list)
    autocast: tuple[bool, torch.dtype] = (False, torch.float32)


def trace(
    model: nn.Module, split_points: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], stages: int
) -> Traced:
    """Cut a model into stages, which begin at `split_points`, and leave it as before. No communication.

    Raises ValueError if the names do not cut the model into so many stages, or if it cannot be traced.
    """
    check_points(model, split_points, stages)
    inputs = Inputs(model, args, kwargs)
    outputs = Outputs(inputs.rows)
    forward = model.forward

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Later stages get what they need of the inputs from the first one, and the last one returns everything: torch
        # passes inputs to the first stage only, and returns only what the last one computes.
        output = inputs.call(forward, [torch.ops.aten.alias.default(tensor) for tensor in tensors])
        return tuple(torch.ops.aten.alias.default(tensor) for tensor in outputs.record(output))

    with _as_before(model, split_points), torch.no_grad(), exporting_by_running(), warnings.catch_warnings():
        # Of torch about torch.
        warnings.filterwarnings(
            "ignore", message=".*(isinstance.treespec, LeafSpec|export_for_training. is)", category=FutureWarning
        )
        model.forward = flat
        try:
            points = dict.fromkeys(split_points, SplitPoint.BEGINNING)
            pipe = pipeline(model, mb_args=inputs.traced(), split_spec=points)
        except RuntimeError as error:
            raise untraceable(model, error) from error
    if pipe.num_stages != stages:
        raise wrong_number(model, split_points, pipe.num_stages, stages)
    kind = PartialState().device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return Traced(pipe, inputs, outputs, _used(pipe), autocast)


def wrong_number(model: nn.Module, split_points: Sequence[str], found: int, stages: int) -> ValueError:
    """Return the error for modules that do not cut a model into so many stages."""
    return ValueError(
        f"split_points={list(split_points)} cut {type(model).__name__} into {found} stages, but there are to be {stages}, in the order of "
        "the names: choose modules that forward calls once each, one after the other."
    )


def check_points(model: nn.Module, split_points: Sequence[str], stages: int) -> None:
    """Raise ValueError for names that are not those of as many modules as begin a stage."""
    names = [name for name, _ in model.named_modules() if name]
    if unknown := [str(point) for point in split_points if point not in names]:
        near = difflib.get_close_matches(unknown[0], names, n=3, cutoff=0.5) or names[:3]
        raise ValueError(
            f"split_points={list(split_points)}: {type(model).__name__} has no module {unknown[0]!r}. Name one of its modules, such "
            f"as {', '.join(map(repr, near))}."
        )
    if not len(set(split_points)) == len(split_points) == stages - 1:
        raise ValueError(
            f"split_points={list(split_points)} name {len(set(split_points))} modules, but {stages} processes are {stages} stages, "
            f"each but the first of which begins with one of them. Name {stages - 1} modules, or use 'auto'."
        )


@contextlib.contextmanager
def _as_before(model: nn.Module, split_points: Sequence[str]) -> Iterator[None]:
    """Undo what tracing leaves on the model: its flat forward, and the marks of torch at the split points."""
    changed = {id(module): module for module in (model, *(model.get_submodule(point) for point in split_points))}
    before = [(module, module.__dict__.get("forward")) for module in changed.values()]
    try:
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("_orig_forward", None)
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward


def untraceable(model: nn.Module, error: BaseException) -> ValueError:
    """Return the error for a model that cannot be traced."""
    cause = error.__cause__ or error
    if isinstance(cause, ValueError) and str(cause).startswith("The model returns"):
        return ValueError(str(cause))
    first = next((line for line in str(cause).splitlines() if line.strip()), "no message")
    return ValueError(
        f"torch.export cannot trace {type(model).__name__} ({type(cause).__name__}: {first.strip()[:300]}). A pipeline needs a "
        "forward that is one graph: no branches on values, in transformers no cache (use_cache=False in `example_kwargs`)."
    )


def _used(pipe: Any) -> list[int]:
    """The positions of the inputs that the first stage takes; a graph leaves out those that the model does not read."""
    nodes = list(pipe.split_gm.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first = next(node for node in nodes if node.op == "call_module")
    return [inputs.index(node) for node in first.args]


def _sends_well(stage: Any) -> None:
    """Mend torch's stage: it sends strided activations, which gloo refuses, and receives in another order."""
    for node in stage.submod.graph.nodes:
        if node.op == "placeholder":
            seen = node.meta["val"]
            node.meta["val"] = torch.empty(seen.shape, dtype=seen.dtype, device="meta")

    def sent(module: nn.Module, inputs: Any, output: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, output)

    if not stage.is_last:
        stage.submod.register_forward_hook(sent)
    # Which output of its stage each received activation is.
    sources = [node.args[1] if node.target is operator.getitem else 0 for node in stage.node.args]
    order = sorted(range(len(sources)), key=sources.__getitem__)
    receives = stage.get_fwd_recv_ops

    def received(chunk: int) -> list[Any]:
        operations = receives(chunk)
        return [operations[place] for place in order]

    if not stage.is_first:
        stage.get_fwd_recv_ops = received


class PipelineSchedule(ScheduleGPipe):
    """This process's stage of a pipeline, and the order in which micro-batches pass it."""

    def __init__(self, traced: Traced, num_chunks: int) -> None:
        state = PartialState()
        self._traced = traced
        self._device, self._rank, self._ranks = state.device, state.process_index, state.num_processes
        self._own = traced.pipe.build_stage(self._rank, device=self._device)
        _sends_well(self._own)
        super().__init__(self._own, num_chunks)
        self.num_chunks = num_chunks
        # By micro-batches: a batch may fill fewer than a whole run has.
        self._steps = {num_chunks: super().step}
        self._samples = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of any number of samples; the last rank gets the output, others None. All ranks.

        The first rank's arguments count; ValueError on all ranks if they differ from the example in more than samples.
        """
        tensors = self._admitted(args, kwargs)
        inputs, pieces = self._traced.inputs, []
        enabled, dtype = self._traced.autocast
        with torch.no_grad(), torch.autocast(self._device.type, dtype=dtype, enabled=enabled):
            for start in range(0, self._samples, inputs.rows * self.num_chunks):
                count = min(math.ceil((self._samples - start) / inputs.rows), self.num_chunks)
                given = ()
                if self._rank == 0:
                    cut = inputs.cut(tensors, start, count)
                    given = tuple(cut[position].to(self._device) for position in self._traced.used)
                pieces.append(self._run(given, count))
        return self._traced.outputs.joined(pieces, self._samples) if self._own.is_last else None

    def _run(self, given: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
        if count not in self._steps:
            self._steps[count] = ScheduleGPipe(self._own, count).step
        output = self._steps[count](*given)
        return (output,) if isinstance(output, torch.Tensor) else output

    def _admitted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
        """Let all ranks know how many samples come, or that the first one's arguments are wrong."""
        communicator = comm.current()
        error, rows, tensors = None, 0, []
        if self._rank == 0:
            try:
                rows, tensors = self._traced.inputs.match(args, kwargs)
            except (TypeError, ValueError) as caught:
                error, rows = caught, _REFUSED
        self._samples = int(communicator.broadcast(torch.tensor([rows], device=self._device), 0).item())
        if self._samples == _REFUSED:
            text = communicator.broadcast_object_list([str(error)], 0)[0]
            raise error or ValueError(f"The first process was called with other arguments than its example: {text}")
        return tensors

    def to_all(self, output: Any) -> Any:
        """Return on every rank what the last one's `step` returned. All ranks."""
        outputs, last = self._traced.outputs, self._ranks - 1
        if self._rank == last:
            leaves = pytree.tree_leaves(output)
            tensors = [value.contiguous() for value in leaves if isinstance(value, torch.Tensor)]
        else:
            shapes = outputs.shapes(self._samples)
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        return outputs.built(comm.current().broadcast(tensors, last))
