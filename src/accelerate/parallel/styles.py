"""What each word of a tensor-parallel plan does to a module: torch's styles, and those that torch has not.

Imported late: torch's tensor parallelism is slow to import.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _SummedGradient(torch.autograd.Function):
    """Hands a tensor through; its gradient is the sum of those of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collectives.wait_tensor(collectives.all_reduce(gradient.contiguous(), "sum", ctx.group)), None


class LocalView:
    """Shows a module its replicated parameters as plain tensors while its forward pass runs.

    The parameters are DTensors then, as optimizers that treat many parameters at once want all of them to be, and
    the module computes with plain tensors, as it was written to.

    Args:
        names: the module's own parameters.
        summed: the name of the group that their gradients are summed over, because each rank uses them on its part
            of the activations; None where every rank has the whole gradient already.
    """

    def __init__(self, names: Iterable[str], summed: str | None = None) -> None:
        self.names = tuple(names)
        self.summed = summed
        self.kept: list[dict[str, Any]] = []  # a stack, for a module that comes by again within itself

    def enter(self, module: nn.Module, arguments: Any) -> None:
        """Put the plain tensors in; a forward pre-hook."""
        own = module._parameters
        self.kept.append({name: own[name] for name in self.names})
        for name in self.names:
            value: Any = own[name]
            value = value.to_local() if isinstance(value, DTensor) else value
            if self.summed is not None and value is not None and torch.is_grad_enabled():
                value = _SummedGradient.apply(value, self.summed)
            own[name] = value

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Put the parameters back; a forward hook that also runs after an error."""
        if self.kept:
            module._parameters.update(self.kept.pop())

    def install(self, module: nn.Module) -> None:
        """Register both hooks."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)


def shows_local_views(module: nn.Module) -> bool:
    """Say whether a module computes with plain views of its parameters already."""
    return any(isinstance(getattr(hook, "__self__", None), LocalView) for hook in module._forward_pre_hooks.values())


def replicate(parameter: nn.Parameter, mesh: "DeviceMesh") -> nn.Parameter:
    """Return a parameter as a DTensor that every rank of a mesh has whole, with the first rank's values.

    Args:
        parameter: a plain parameter, of any device.
        mesh: one dimension. Every rank of it calls this.
    """
    made = distribute_tensor(parameter.detach(), mesh, [Replicate()])
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


class SummedReplica(ParallelStyle):
    """Every rank has the module whole and runs it on its own part of the activations (its heads, say); gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        group = device_mesh.get_group().group_name
        for part in module.modules():
            names = [name for name, value in part._parameters.items() if value is not None]
            if names:
                LocalView(names, group).install(part)
        return module


class SplitSequence(SummedReplica):
    """The module runs on this rank's part of the sequence (dimension 1); before and after it every rank has all of it.

    Unlike torch's `SequenceParallel`, which leaves the activations split, it asks nothing of its neighbours.
    """

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        lengths: list[torch.Size] = []

        def split(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            whole, *others = arguments
            lengths.append(whole.shape)
            part = DTensor.from_local(whole, device_mesh, [Replicate()], run_check=False)
            return part.redistribute(placements=[Shard(1)]).to_local(), *others

        def join(_: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            whole = torch.Size((*lengths.pop()[:2], *output.shape[2:]))
            stride = torch.empty(whole, device="meta").stride()
            part = DTensor.from_local(output, device_mesh, [Shard(1)], run_check=False, shape=whole, stride=stride)
            return part.redistribute(placements=[Replicate()]).to_local()

        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(split)
        module.register_forward_hook(join)
        return module


def _rowwise(module: nn.Module) -> ParallelStyle:
    # Token numbers are never split, so an embedding's input is whole whatever the plan calls it.
    return RowwiseParallel(input_layouts=Replicate()) if isinstance(module, nn.Embedding) else RowwiseParallel()


# The words of plans, those of transformers among them, to what they do.
WORDS: dict[str, Callable[[nn.Module], ParallelStyle | None]] = {
    "colwise": lambda module: ColwiseParallel(),
    "colwise_rep": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": _rowwise,
    "rowwise_rep": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": lambda module: SplitSequence(),
    "replicated_with_grad_allreduce": lambda module: SummedReplica(),
    "replicate": lambda module: None,
}


def cut_dimension(style: Any, module: nn.Module, name: str) -> int | None:
    """Return along which dimension a style cuts a parameter of a module; None where it is left whole or nobody knows.

    Args:
        style: a ParallelStyle, or None.
        module: whose parameter it is.
        name: such as "weight".
    """
    if type(style) is ColwiseParallel:
        return 1 if isinstance(module, nn.Embedding) else 0
    if type(style) is RowwiseParallel and name == "weight":
        return 0 if isinstance(module, nn.Embedding) else 1
    return None


def keeps_output_cut(style: Any) -> bool:
    """Say whether what a module with this style returns is this rank's part only."""
    return type(style) is ColwiseParallel and any(isinstance(item, Shard) for item in style.output_layouts)
