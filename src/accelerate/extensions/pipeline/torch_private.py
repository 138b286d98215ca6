"""torch's private names that this extension uses, of exported graphs and views; see `accelerate.runtime.torch_private`."""

import inspect
import warnings

import torch


def traced_graph(module: torch.nn.Module, tensors: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    """Return the graph of a module that is run, whose parameters are the module's; without torch's checks of its arguments (since 2.9)."""
    program = torch.export.export(module, tensors, strict=False)
    options = {"check_guards": False} if "check_guards" in inspect.signature(program.module).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch about torch
        return program.module(**options)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another one in autograd's eyes, which cannot be detached in place."""
    return tensor._is_view()
