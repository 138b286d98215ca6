"""Megatron core on processors: what it asks of "cuda" is done by the host. Importing this module switches that on, for the whole process."""

import logging

import torch
from torch.overrides import TorchFunctionMode


def _on_host(value):
    """Return the host's device for a GPU, whichever way it is written; anything else as it is."""
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class CudaOnCpu(TorchFunctionMode):
    """Lets functions of torch that are told of a GPU work on the host."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return arguments[0]
        if name == "type" and len(arguments) == 1:  # core asserts that gradients are on a GPU
            return function(*arguments).replace("torch.", "torch.cuda.")
        keywords = {key: _on_host(value) for key, value in (keywords or {}).items()}
        return function(*map(_on_host, arguments), **keywords)


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = torch.cuda.empty_cache = lambda *arguments: None
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *arguments, **keywords: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)  # the host's generator is its GPU's
CudaOnCpu().__enter__()

from megatron.core.tensor_parallel import random  # noqa: E402  it asks for the device at its import

random._set_cuda_rng_state = lambda state, *arguments, **keywords: torch.set_rng_state(state)
CheckpointFunction = random.CheckpointFunction
_backward = CheckpointFunction.backward


def _backward_on_host(context, *gradients):
    with CudaOnCpu():  # autograd leaves modes behind, and a backward pass that recomputes makes tensors
        return _backward(context, *gradients)


CheckpointFunction.backward = staticmethod(_backward_on_host)
