"""Memory of one training step besides parameters and optimizer state, measured on fake tensors, which have only shapes.

The step of a model is cut into segments: a forward and a backward one for each unit that FSDP shards, and for the parts
between units. `extensions.reports.estimator` adds a layout's other memory to each. Only three of repeated blocks are run;
the others follow from the difference of the second and the third.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accelerate.extensions.plan import gpu_kernels
from accelerate.extensions.plan.torch_private import convolution_scratch, looks_at_values, shapes_of_wholes_unseen
from accelerate.extensions.reports.allocations import ACTIVATIONS, GRADIENTS, AllocationTracker, label
from accelerate.extensions.reports.collectives import collective_of
from accelerate.extensions.reports.estimator import Layout
from accelerate.extensions.reports.inventory import Profile, Segment, block_names, inventory_of_model
from accelerate.extensions.reports.throughput import flops_of
from accelerate.extensions.reports.torch_private import is_distributed, replaced
from accelerate.extensions.sequence import models as sequence_models
from accelerate.extensions.sequence import sequence as sequences
from accelerate.extensions.simulate.torch_private import join_alone, reads_value, run_on_shapes, shapes_only
from accelerate.extensions.tensor import experts
from accelerate.extensions.tensor import tensor as tensor_parallel
from accelerate.precision.amp import precision as precision_row
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import TorchDispatchMode, pytree

Inputs = Callable[[int, int], Mapping[str, torch.Tensor]]


def measure(
    build: Callable[[], nn.Module], inputs: Inputs, layout: Layout, sequence: int, gpu: bool = False
) -> Profile:
    """Return the allocations of one step of a model.

    Not a collective. With `tp`, `cp`, `sp` or `ep` the process must have joined no group.

    Args:
        build: returns the model, on any device; best on torch's meta device.
        inputs: returns the arguments of its forward for a batch and a length of sequences.
        layout: its micro-batch, its precision, whether it recomputes and casts, and how ranks share layers, sequences and
            experts. Tokens are assumed to spread evenly among experts.
        sequence: tokens of a full sequence.
        gpu: with the allocations of a GPU's kernels where they differ.

    Raises:
        ValueError: the model cannot be split or has no checkpointing, or its forward looks at values.
    """
    batch, tp, cp, sp, ep = layout.micro_batch, layout.tp, layout.cp, layout.sp, layout.ep
    model = build().train()
    if layout.checkpointing and not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(): it recomputes no activations."
        )
    if layout.checkpointing:
        # Transformers before 5 makes a block's output without gradients otherwise.
        takes = "gradient_checkpointing_kwargs" in inspect.signature(model.gradient_checkpointing_enable).parameters
        model.gradient_checkpointing_enable(*[{"use_reentrant": False}] * takes)
    for module in () if layout.checkpointing else model.modules():
        if getattr(module, "gradient_checkpointing", False):  # so transformers and diffusers mark it
            module.gradient_checkpointing = False
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    styles = tensor_parallel.resolve(model, None, tp) if tp > 1 else {}
    dtype = precision_row(layout.precision).autocast_dtype
    with contextlib.ExitStack() as last:
        if gpu:
            last.enter_context(gpu_kernels.as_on_gpus((sequences, "ATTENTION")))
        if tp * cp * sp * ep > 1:
            last.enter_context(_joined(tp * cp * sp * ep))
        sharing = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)) if tp > 1 else None
        if cp * sp > 1:
            last.enter_context(_cut_sequences(model, sequence, "cp" if cp > 1 else "sp", cp * sp))
        split, tokens_of_expert = None, 0 if cp * sp > 1 else None
        if ep > 1:
            split = experts.splitting(model, ep, ep)[1]
            tokens_of_expert = batch * sequence * getattr(model.config, "num_experts_per_tok", 1) // ep
        last.enter_context(shapes_only())
        _fake(model, dtype if layout.casts else None)
        if split is not None:
            split()
        if sharing is not None:
            tensor_parallel.cut(model, styles, sharing)
            last.enter_context(shapes_of_wholes_unseen())
        inventory = inventory_of_model(model, type(model).__name__)
        if sharing is not None:  # FSDP shards the parts over all of its ranks
            inventory = replace(inventory, items=tuple(replace(item, split=1) for item in inventory.items))
        for module in list(experts.modules(model)):  # as FSDP hands them to forward
            for entry, value in list(module._parameters.items()):
                module._parameters[entry] = nn.Parameter(torch_private.local_part(value))
        units, left_out, stem = _shorten(model)
        recorder = _Recorder(model, tokens_of_expert, gpu)
        with recorder.watching(model, units), _as_if_real():
            arguments = dict(inputs(batch, sequence // (cp * sp)))
            if cp * sp > 1 and "labels" in arguments:
                arguments["shift_labels"] = arguments["labels"]
            context = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
            try:
                with context:
                    loss = _loss(model(**arguments))
                recorder.enter(True, "")
                loss.backward()
            except looks_at_values() as error:
                raise ValueError(
                    f"The forward of {type(model).__name__} looks at values, so it cannot run on shapes only: {error}."
                ) from error
    segments = recorder.segments if not left_out else _lengthen(recorder.segments, stem, left_out)
    return Profile(inventory, tuple(segments), batch * sequence // cp * _keys(model, tp))


@contextlib.contextmanager
def _joined(ranks: int) -> Iterator[None]:
    """Let this process be one of so many ranks without the others, for a time."""
    if dist.is_initialized():
        raise ValueError("A model that ranks split is measured in a process that has joined no process group.")
    join_alone(0, ranks, dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _cut_sequences(model: nn.Module, sequence: int, axis: str, ranks: int) -> Iterator[None]:
    """Let the attention of a model exchange data like that of a rank with a part of each sequence."""
    part = init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))
    region = sequences.SequenceRegion(part) if axis == "sp" else sequences.GatheringRegion("cp", part, cuts=2)
    sequence_models.check(model, axis)
    sequence_models.attach(model, region)
    places = torch.arange(sequence)[None]
    with region([places], [1], [places]):
        yield


def _keys(model: nn.Module, tp: int) -> int:
    """Numbers of the keys and values of a token in all layers, by the configuration of a transformers model."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * size // tp


def _as_if_real() -> AbstractContextManager[None]:
    """Let transformers run as in a real run: with fake tensors it would make its own masks."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"]
    patched = [
        (module, name)
        for module in modules
        for name in ("is_tracing", "is_fake_tensor")
        if callable(vars(module).get(name))
    ]
    return replaced(*((module, name, lambda *_, **__: False) for module, name in patched))


def _loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    floating = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return floating[0].float().mean()


def _fake(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Put fake tensors in the place of a model's tensors."""
    fake_tensors: dict[int, Any] = {}
    for module in list(model.modules()):
        for entry, old in list(module._parameters.items()):
            if old is None:
                continue
            if id(old) not in fake_tensors:
                kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
                fake_tensors[id(old)] = (nn.Parameter(torch.empty(old.shape, dtype=kind), old.requires_grad), old)
            module._parameters[entry] = fake_tensors[id(old)][0]
        for entry, old in list(module._buffers.items()):
            if old is not None:
                module._buffers[entry] = torch.empty(old.shape, dtype=old.dtype)


_RUN = 3


def _shorten(model: nn.Module) -> tuple[list[str], int, str]:
    """Keep three of a model's equal blocks in one list; return the remaining units, the number removed, and the list."""
    blocks = block_names(model)
    for name, module in model.named_modules():
        inner = [f"{name}.{number}" for number in range(len(module))] if isinstance(module, nn.ModuleList) else []
        if len(inner) > _RUN and set(inner) <= set(blocks):
            shapes = {tuple((entry, value.shape) for entry, value in block.named_parameters()) for block in module}
            if len(shapes) == 1:
                removed = len(module) - _RUN
                del module[_RUN:]
                return [block for block in blocks if block not in inner[_RUN:]], removed, name
    return blocks, 0, ""


def _lengthen(segments: list[Segment], stem: str, count: int) -> list[Segment]:
    """Insert the segments of the blocks that were removed after the third one."""
    second, third = (f"{stem}.{number}" for number in (_RUN - 2, _RUN - 1))
    at = {(segment.backward, segment.unit): segment for segment in segments}
    grown = {  # memory that a block keeps in forward, and for the backward pass
        False: at[False, third].end - at[False, second].end,
        True: at[True, third].peak - at[True, second].peak,
    }
    longer: list[Segment] = []
    # Segments after the blocks in forward, and before them in backward, have all of their activations below them.
    above = 0
    for segment in segments:
        steps, names = [above], [segment.unit]
        if segment.unit == third:
            above = 0 if segment.backward else count
            steps = list(range(count, -1, -1) if segment.backward else range(count + 1))
            names = [f"{stem}.{_RUN - 1 + step}" for step in steps]
        for step, unit in zip(steps, names, strict=True):
            more = step * grown[segment.backward]
            longer.append(replace(segment, unit=unit, peak=segment.peak + more, end=segment.end + more))
    return longer


class _Recorder(TorchDispatchMode):
    """Follows the memory that a step makes, segment by segment.

    `read_value` is the value of integers that the model reads. With experts on several ranks it is the number of tokens that a
    rank gets from another. If ranks share sequences, it is 0, the number of wrong positions.
    """

    def __init__(self, model: nn.Module, tokens_of_expert: int | None, gpu: bool) -> None:
        super().__init__()
        self.read_value, self.gpu = tokens_of_expert, gpu
        self.segments: list[Segment] = []
        self.tracker = AllocationTracker()
        label(self.tracker, [model], [])
        self._start(False, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its results."""
        if any(map(is_distributed, types)):
            return NotImplemented  # it is dispatched again as operations on local parts, exchanges included
        if reads_value(func):
            if args[0].dtype == torch.bool:
                return True  # models ask whether a mask is full, or sequences are complete: those of a plan are
            if self.read_value is not None and not args[0].is_floating_point():
                return self.read_value
        out = run_on_shapes(func, args, kwargs or {})
        self.tracker.see(out)
        self.flops += flops_of(func, args, kwargs or {}, out)
        if (sent := collective_of(func, args, out)) is not None:
            self.split.append(sent)
        scratch = 0 if self.gpu else convolution_scratch(func, args, out)
        self.peak = max(self.peak, self._bytes + self._created + scratch)
        return out

    @property
    def _bytes(self) -> int:
        """Activations and temporaries; a gradient is one until it is complete."""
        return self.tracker.bytes[ACTIVATIONS]

    @property
    def _created(self) -> int:
        return self.tracker.bytes[GRADIENTS] - self.before

    def _start(self, backward: bool, unit: str) -> None:
        self.backward, self.unit, self.flops = backward, unit, 0
        self.before, self.peak, self.split = self.tracker.bytes[GRADIENTS], self._bytes, []

    def _finish(self) -> None:
        self.segments.append(
            Segment(self.backward, self.unit, self.peak, self._bytes, self._created, self.flops, tuple(self.split))
        )

    def enter(self, backward: bool, unit: str) -> None:
        """Begin the next segment."""
        if (backward, unit) != (self.backward, self.unit):
            self._finish()
            self._start(backward, unit)

    @contextlib.contextmanager
    def watching(self, model: nn.Module, units: list[str]) -> Iterator[None]:
        """Count inside, with hooks that say where a unit begins and ends."""
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda owner: self.tracker.see(owner.grad, GRADIENTS))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        modules = dict(model.named_modules())
        for name in units:
            handles += self._at_borders(name, modules[name])
        try:
            with self:
                yield
            self._finish()
        finally:
            for handle in handles:
                handle.remove()

    def _at_borders(self, name: str, module: nn.Module) -> list[Any]:
        def began(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.backward:  # it is computed again
                return
            self.enter(False, name)
            for leaf in _tracked((args, kwargs)):
                leaf.register_hook(end_unit)

        def ended(_: nn.Module, args: Any, output: Any) -> None:
            if self.backward:
                return
            self.enter(False, "")
            for leaf in _tracked(output):
                leaf.register_hook(lambda gradient: self.enter(True, name))

        def end_unit(_: torch.Tensor) -> None:
            if self.unit == name:
                self.enter(True, "")

        return [module.register_forward_pre_hook(began, with_kwargs=True), module.register_forward_hook(ended)]


def _tracked(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
