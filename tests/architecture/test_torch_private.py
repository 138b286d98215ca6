"""What torch keeps private is named in few files, so that a new torch has few places to look at."""

import ast
from collections.abc import Iterator

import pytest

from architecture import source

# All files are parsed once.
pytestmark = pytest.mark.xdist_group("syntax trees")

# Names of files: each extension may have a torch_private of its own.
HOMES = ("torch_private", "torch_compat")
# Private names of others that files may use as they are, and why.
ALLOWED = {
    "torch's tables of a module's and an optimizer's parts and hooks, which every extension of torch reads": (
        "_parameters _buffers _modules _non_persistent_buffers_set _apply _forward_pre_hooks _compiled_call_impl _orig_mod "
        "_load_from_state_dict _load_state_dict_pre_hooks _load_state_dict_post_hooks _optimizer_load_state_dict_pre_hooks "
        "_optimizer_load_state_dict_post_hooks _get_iterator _num_samples _metadata"
    ),
    "documented by torch": (
        "_foreach_norm _foreach_mul_ _foreach_copy_ _foreach_clamp_min_ _foreach_clamp_max_ _HYBRID_SHARD_ZERO2 _record_memory_history "
        "_dump_snapshot _dynamo _base"
    ),
    "torch's agent and schedulers, documented for subclasses": (
        "_start_workers _stop_workers _monitor_workers _rendezvous _step_count"
    ),
    "torch's gradient scaler, from which ours derives": "_get_scale_async _per_optimizer_states _step_supports_amp_scaling",
    "DDP: whether it has learned a static graph, and its buckets": "_static_graph_delay_allreduce_enqueued _rebuild_buckets",
    "documented for what follows a backward pass": "_execution_engine",
    "Python": (
        "_exit _getframe _current_frames _current_exceptions _register_atexit _actions _SubParsersAction _ArgumentGroup "
        "_ActionsContainer _action_groups _format_usage _format_action_invocation _fields _replace _get_value _option_string_actions _inheriting "
        "_run_code _run_module_as_main _run_exitfuncs _shutdown _registry"  # of runpy, atexit, threading and weakref.finalize
    ),
    "transformers, datasets, PEFT": "_no_split_modules _tie_weights _attn_implementation _tp_plan _pp_stage _resolve_parallel_plans _distributed _ex_iterable",
    "torchao": "_new_buffer",
    "DeepSpeed, in backends/deepspeed": (
        "_get_zero_param_shapes _hp_mapping _reassign_or_swap_out_partitioned_parameters "
        "_PartitionedParameterCoordinator__params_to_release _SEQUENCE_PARALLEL_GROUP _SEQUENCE_DATA_PARALLEL_GROUP _global_grad_norm"
    ),
    "numpy, fsspec, torch_xla, Habana": (
        "_core _reconstruct _strip_protocol _fetch_gradients _XLAC _xla_runtime_is_initialized _get_device_type"
    ),
}
ALLOWED_NAMES = {name for names in ALLOWED.values() for name in names.split()}


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def defined_by_us() -> set[str]:
    """Return the private names that our own files give to something."""
    found = set()
    for path in source.files():
        for node in ast.walk(source.tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.keyword):  # vars(self).update(_inner=...)
                found.add(node.arg)
    return found


def foreign_names(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Yield where a file uses private names that are not ours: imports from torch, attributes, `getattr` and `hasattr`."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for one in node.names if one.name.startswith("torch.") for part in one.name.split(".")]
        elif isinstance(node, ast.Attribute) and node.attr not in ours:
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant) and one.value not in ours]
        yield from ((node.lineno, name) for name in names if is_private(name) and name not in ALLOWED_NAMES)


def test_what_torch_keeps_private_is_named_in_its_files_alone():
    ours = defined_by_us()
    wrong = [
        f"{name}:{line} {found}"
        for name, path in source.modules().items()
        if name.rpartition(".")[2] not in HOMES
        for line, found in foreign_names(source.tree(path), ours)
    ]
    assert not wrong, (
        "put them into runtime/torch_private.py, with what happens where they are not there:\n" + "\n".join(wrong)
    )


def test_the_check_finds_each_kind_of_use():
    program = """
import torch._inductor
from torch.utils import _pytree
from torch._utils import render
getattr(group, "_device_types", ())
mesh._flatten_mapping
module._parameters, own._ours
"""
    found = [name for _, name in foreign_names(ast.parse(program), {"_ours"})]
    assert sorted(found) == ["_device_types", "_flatten_mapping", "_inductor", "_pytree", "_utils"]
