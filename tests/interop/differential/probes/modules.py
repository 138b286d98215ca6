"""Questions about modules, their compilation, and taking them out of wrappers."""

import types

import torch
from torch import nn

from accelerate.utils import other
from interop.differential.core import call, probe, short


def blocks(*kinds):
    made = {"relu": nn.ReLU, "linear": lambda: nn.Linear(2, 2), "nest": lambda: nn.Sequential(nn.ReLU())}
    return nn.ModuleDict({"layers": nn.ModuleList([made[kind]() for kind in kinds]), "head": nn.Linear(2, 2)})


def shared():
    part = nn.Linear(2, 2)
    return nn.ModuleDict({"a": part, "b": nn.Sequential(part, nn.ReLU())})


MODULES = {
    "linear": lambda: nn.Linear(2, 2),
    "sequential": lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh(), nn.ReLU())),
    "equal sequential": lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), "empty list": nn.ModuleList,
    "one block": lambda: nn.ModuleList([nn.ReLU()]), "equal blocks": lambda: nn.ModuleList([nn.ReLU(), nn.ReLU()]),
    "unequal blocks": lambda: nn.ModuleList([nn.ReLU(), nn.Tanh()]),
    "blocks inside": lambda: blocks("linear", "linear"), "unequal inside": lambda: blocks("linear", "relu"),
    "nested blocks": lambda: nn.ModuleList([blocks("nest", "nest"), blocks("nest", "nest")]), "shared": shared,
    "module dict": lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()}),
    "data parallel": lambda: nn.DataParallel(blocks("linear", "linear")),
    "parameters": lambda: nn.ParameterList([torch.ones(1)]),
}  # fmt: skip
NO_MODULES = {
    "None": lambda: None, "text": lambda: "text", "tensor": lambda: torch.ones(1), "list": list,
}  # fmt: skip


QUESTIONS = [
    "is_compiled_module", "has_compiled_regions", "is_repeated_blocks", "has_repeated_blocks", "model_has_dtensor",
]  # fmt: skip
short(
    "asked", lambda question, module: getattr(other, question)(module), *(f"utils.other:{q}" for q in QUESTIONS),
    question=QUESTIONS, module=MODULES,
)  # fmt: skip


@probe("utils.other:get_module_children_bottom_up", module=MODULES | NO_MODULES, return_fqns=[False, True])
def get_module_children_bottom_up(module, return_fqns):
    listed = other.get_module_children_bottom_up(module, return_fqns=return_fqns)
    return [(item[0], type(item[1]).__name__) if return_fqns else type(item).__name__ for item in listed]


class WithSize(nn.Linear):
    """A module that knows its parallel size, and has a `module`."""

    def __init__(self, tp_size=2, module=None):
        super().__init__(2, 2)
        self.tp_size = tp_size
        if module is not None:
            self.module = module


def with_config(**fields):
    model = nn.Linear(1, 1)
    model.config = types.SimpleNamespace(**fields)
    return model


call(
    "utils.other:get_model_tp_size",
    model={
        **{f"{size}": lambda size=size: WithSize(size) for size in (None, 0, 1, 2, "2")},
        "no size": lambda: nn.Linear(1, 1), "config": lambda: with_config(tp_size=2),
        "distributed": lambda: with_config(distributed_config={"tp_size": 4}), "None": lambda: None,
        "in a wrapper": lambda: nn.DataParallel(WithSize()),
    },
)  # fmt: skip


@probe(
    "utils.other:extract_model_from_parallel",
    model={
        **MODULES, "wrapped twice": lambda: nn.DataParallel(nn.DataParallel(nn.Linear(1, 1))),
        "inside": lambda: nn.Sequential(nn.DataParallel(nn.ReLU())), "own module": lambda: WithSize(module=nn.ReLU()),
    }, keep_fp32_wrapper=[True, False], keep_torch_compile=[True, False], recursive=[False, True],
)  # fmt: skip
def extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile, recursive):
    result = other.extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile, recursive)
    modules = [type(part).__name__ for part in result.modules()] if isinstance(result, nn.Module) else []
    return result is model, type(result).__name__, modules
