"""Definitions that need little around them: each is called with a row of arguments, and what comes of it is compared."""

import argparse
import functools
import importlib
import logging
import sys
import types
from collections import namedtuple
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator, PartialState
from accelerate.utils import CustomDtype, TensorInformation, dataclasses, other
from interop.differential.core import attempt, probe
from interop.differential.probes.launching import listed

Pair = namedtuple("Pair", "left right")
ADDED = {"skip_samples", "epoch"}  # attributes that this package alone has


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)) * self.scale)


def shown(value):
    """Show an object of the package by its public attributes, a model by its output, and a context by what it yields."""
    if isinstance(value, Path):
        return value.name
    if isinstance(value, nn.Module):
        return [type(value).__name__, sorted(value.state_dict())]
    if type(value).__module__.startswith("accelerate.") and hasattr(value, "__dict__"):
        kept = {
            k: v
            for k, v in sorted(vars(value).items())
            if k[0] != "_" and k not in ADDED and isinstance(v, (int, float, str))
        }
        return [type(value).__name__.lstrip("_"), str(value) if isinstance(value, Exception) else kept]
    if hasattr(value, "__enter__") and not isinstance(value, torch.Tensor):
        with value as inner:
            return [type(value).__name__, shown(inner)]
    return value


def row(cover, *calls, state=False):
    """Register a definition with the arguments of its calls, the last of which may be keywords in a namespace.

    A function in place of a tuple makes the arguments when the case runs.
    """
    module, _, name = cover.partition(":")

    def run(given):
        if state:
            PartialState(cpu=True)
        *args, last = [*given, None]
        if args and isinstance(args[-1], types.SimpleNamespace):
            last = args.pop()
        result = getattr(importlib.import_module(f"accelerate.{module}"), name)(
            *args, **vars(last or argparse.Namespace())
        )
        yield "result", shown(result)
        yield "arguments", [shown(value) for value in args if not callable(value)]

    run.__name__, run.__module__ = f"{module.rpartition('.')[2]}_{name}", __name__
    given = {str(n): (c if callable(c) else functools.partial(lambda v: v, c)) for n, c in enumerate(calls)}
    probe(cover, quick=9, given=given)(run)


def with_(**keywords):
    return types.SimpleNamespace(**keywords)


def optimizer(kind=torch.optim.SGD):
    return kind([nn.Parameter(torch.ones(2))], lr=0.1)


def accelerated(*args):
    Accelerator(cpu=True)
    return args


def scheduler():
    return torch.optim.lr_scheduler.StepLR(optimizer(), 1)


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--b", type=int, default=3)
    made.add_argument("--d", action="store_true")
    return made


DATA = [
    torch.arange(6.0).reshape(2, 3), {"a": torch.ones(2, dtype=torch.float16), "b": [torch.ones(1, 2)]},
    Pair(torch.zeros(3), "x"), [], None, torch.ones(1),
]  # fmt: skip
for name_ in listed(
    "find_device find_batch_size ignorant_find_batch_size get_shape listify convert_to_fp32 is_torch_tensor "
    "is_namedtuple reduce broadcast"
):
    row(f"utils.operations:{name_}", *((value,) for value in DATA), state=True)
row("utils.operations:is_tensor_information", (TensorInformation((1,), torch.float32),), (None,))
row("utils.operations:honor_type", ([1], iter("ab")), (Pair(1, 2), iter("ab")), ((1,), iter("ab")), ({1}, iter("ab")))
row("utils.operations:DistributedOperationException", ("text",), ())
for name_ in listed(
    "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType "
    "LoggerType PrecisionType RNGType SageMakerDistributedType"
):
    row(f"utils.dataclasses:{name_}", ("no",), ("NO",), ("fp16",), ("all",), ("torch",), ("nonsense",))
row("utils.dataclasses:BaseEnum", ("Own", {"FIRST": "a"}))
row("utils.dataclasses:EnumWithContains", ("Own", (dataclasses.BaseEnum,), {}))
row(
    "utils.dataclasses:get_module_class_from_name",
    *((Own(), name) for name in ("Linear", "linear", "Own", "Conv1d", "")),
)
row("utils.environment:are_libraries_initialized", (), ("torch",), ("numpy", "no_such"), ("torch.nn",))
row("utils.environment:clear_environment", ())
row(
    "utils.environment:convert_dict_to_env_variables", ({"A": "1", "B": "x y"},), ({"A": "<x>", "B": "a;b"},), ({},),
    state=True,
)  # fmt: skip
row("utils.environment:get_int_from_env", ([], 3), (["PROBED"], 3), ("PROBED", 3))
for name_ in ("override_numa_affinity", "set_numa_affinity"):
    row(f"utils.environment:{name_}", (0,), (0, True))
for name_ in ("parse_flag_from_env", "parse_choice_from_env"):
    row(f"utils.environment:{name_}", ("PROBED",), ("PROBED", True), ("PROBED", "yes"), ("PROBED", None))
row("utils.environment:patch_environment", (with_(probed="x"),), (with_(PROBED=1),), (with_(probed=True),))
row("utils.other:check_os_kernel", (), state=True)
row(
    "utils.other:convert_bytes",
    *((size,) for size in (0, 1023, 1024, 1536, 2**40, 2**60, 2**70, -2048, 0.5, "1", None)),
)
row(
    "utils.other:get_pretty_name",
    *((value,) for value in (len, Own, Own(), sys, "x", None, Own.forward, torch.ones(1))),
)
row("utils.other:is_port_in_use", *((port,) for port in (0, -1, 65536, "x", 1.5, True)))
row(
    "utils.other:merge_dicts", ({}, None), ([], {}), ({"a": 1}, []), ({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}),
    ("", {}),
)  # fmt: skip
row("utils.versions:is_torch_version", *((o, v) for o in ("==", "~=", ">=", "<", "") for v in ("2.0", "2.13", "x")))
row("utils.operations:recursively_apply", *((torch.neg, value) for value in DATA), (len, [1, "ab"]))
row("data_loader:get_sampler", (torch.utils.data.DataLoader(range(3)),), (None,))
row("utils.other:recursive_getattr", *((Own(), name) for name in ("scale", "blocks.0.bias", "blocks.", "", "no.such")))
row("utils.other:wait_for_everyone", (), state=True)
row("utils.environment:str_to_bool", ("y",), ("Off", False), ("maybe",), (" true", True), ("", None))
row("utils.memory:clear_device_cache", (), (False,))
row("utils.memory:release_memory", (), (None,), (1, [torch.ones(2)]))
row("utils.random:synchronize_rng_states", ([],), ("torch",), (["nothing"],), state=True)
row("utils.tqdm:tqdm", ([1, 2], with_(disable=True)), (True, [1]), (False, [1], with_(disable=True)), state=True)
row("utils.torch_xla:install_xla", (), (True,))
row(
    "utils.ao:filter_linear_layers",
    *((nn.Linear(16, out), name, ["kept"]) for out in (16, 7) for name in ("a", "kept")),
)
for name_ in ("find_first_last_linear_layers", "has_ao_layers"):
    row(f"utils.ao:{name_}", (Own(),), (nn.Linear(16, 16),), (nn.ReLU(),))
row("utils.deepspeed:HfDeepSpeedConfig", ({},), ({"zero_optimization": {"stage": 3}},), ("absent.json",))
row("utils.deepspeed:DummyOptim", ([1],), ([1], 0.1), ([1], with_(lr=0, weight_decay=0.1, a="b")))
for name_ in ("utils.deepspeed:DummyScheduler", "utils.megatron_lm:MegatronLMDummyScheduler"):
    row(name_, (None,), (1, with_(total_num_steps=10)), (1, with_(total_num_steps=0, warmup_num_steps=3, a=1)))
row("utils.deepspeed:DeepSpeedEngineWrapper", ("engine",))
row("utils.deepspeed:DeepSpeedOptimizerWrapper", lambda: (Accelerator(), optimizer())[1:])
row("utils.deepspeed:DeepSpeedSchedulerWrapper", lambda: (Accelerator(), scheduler(), None)[1:])
row("utils.deepspeed:map_pytorch_optim_to_deepspeed", lambda: (optimizer(),), lambda: (optimizer(torch.optim.AdamW),))
row("utils.imports:deepspeed_required", (len,))
row("utils.megatron_lm:AbstractTrainStep", ("a",))
row("utils.modeling:_get_proper_dtype", (torch.float16,), ("float16",), ("torch.int8",), (None,))
row("utils.modeling:dtype_byte_size", (CustomDtype.INT4,), (CustomDtype.FP8,), (None,), (torch.bool,))
row(
    "utils.modeling:check_device_same", ("cpu", torch.device("cpu")), (torch.device("cuda"), torch.device("cuda", 0)),
    (torch.device("cpu"), torch.device("meta")),
)  # fmt: skip
row("utils.modeling:check_tied_parameters_in_config", (Own(),), (nn.Linear(1, 1),))
row("utils.modeling:find_tied_parameters", (Own(),), (nn.Linear(1, 1),))
row("utils.modeling:get_grad_scaler", (), (None, with_(enabled=False)))
row("utils.modeling:get_max_layer_size", ([("a", nn.Linear(2, 2)), ("b", nn.ReLU())], {"a": 3, "b": 9}, []))
row("utils.modeling:get_mixed_precision_context_manager", accelerated, lambda: accelerated(False))
row("utils.modeling:id_tensor_storage", (torch.ones(2, device="meta"),))
row("utils.modeling:is_peft_model", (Own(),))
row(
    "utils.modeling:get_module_leaves",
    *(
        (sizes,)
        for sizes in ({}, {"": 5, "a": 5}, {"a.b.c": 1, "a": 2, "ab": 3}, {"": 1, "00": 2, "0.0": 3}, {1: 2}, None)
    ),
)
row(
    "utils.modeling:retie_parameters", (Own(), [["embed.weight", "head.weight"]]), (Own(), []),
    (Own(), [["no.such", "scale"]]),
)  # fmt: skip
row(
    "utils.offload:offload_state_dict", ("a", {"w": torch.ones(2), "b": torch.ones((), dtype=torch.bfloat16)}),
    ("a", {}),
)  # fmt: skip
row("utils.offload:save_offload_index", ({"w": {"dtype": "float32", "shape": [1]}}, "."), ({}, "."))
for name_ in ("attach_align_device_hook", "attach_execution_device_hook"):
    row(f"hooks:{name_}", (Own(), "cpu"), (Own(), None))
row("hooks:remove_hook_from_module", (Own(),), (Own(), True))
row("hooks:remove_hook_from_submodules", (Own(),))
row("hooks:LayerwiseCastingHook", (torch.float16, torch.float32, False))
row("utils.fsdp_utils:_get_model_state_dict", (Own(),))
row("utils.fsdp_utils:_set_model_state_dict", (Own(), Own().state_dict()))
row("utils.fsdp_utils:enable_fsdp_ram_efficient_loading", ())
row("utils.fsdp_utils:disable_fsdp_ram_efficient_loading", ())
row("utils.fsdp_utils:get_fsdp2_grad_scaler", (), (with_(enabled=False),))
row(
    "utils.launch:_convert_nargs_to_dict",
    *((line.split(),) for line in ("--a 1.5 --b x", "--a --b -1", "--a true", "")),
)
row(
    "utils.launch:_filter_args", (argparse.Namespace(a=1), parser(), ["--b", "9", "--z"]),
    (argparse.Namespace(b=5), parser()),
)  # fmt: skip
row("utils.launch:env_var_path_add", ("SOME_PATH", "/c"), ("SOME_PATH", ""))
row("commands.config.config_utils:SubcommandHelpFormatter", ("prog",))
row(
    "commands.config.default:default_config_command",
    (with_(args=argparse.Namespace(config_file="a.json", mixed_precision="bf16")),),
)
row("commands.estimate:check_has_model", (ValueError("x"),), (OSError("gated repo"),))
row("commands.to_fsdp2:ConversionStatus", (0,), (1,), (2,), (9,))
row("commands.utils:CustomArgumentParser", ("prog",))
row("commands.utils:CustomArgumentGroup", (parser(), "group"))
row("launchers:test_launch", ())
row("checkpointing:save_custom_state", (nn.Linear(1, 1), "."), (None, "."), state=True)
row("checkpointing:load_custom_state", (nn.Linear(1, 1), "nowhere"), state=True)
row("data_loader:SkipBatchSampler", ([[1], [2]], 1), ([[1]],))
row("data_loader:IterableDatasetShard", ([1, 2, 3], 2), ([1, 2, 3], 2, True, 3, 1))
row("optimizer:patch_optimizer_step", (with_(),), (with_(_accelerate_step_called=False),))
row("state:do_nothing", (), (1,))
row("state:is_initialized", ())
row("tracking:on_main_process", (len,))
MAIN = ["def main():\n", "    a = 1\n", 'if __name__ == "__main__":\n']
row("test_utils.examples:get_function_contents_by_name", (MAIN, "main"), ([], "other"))
for name_ in ("AccelerateTestCase", "MockingTestCase", "TempDirTestCase"):
    row(f"test_utils.testing:{name_}", (), ("no_such_test",))
row("test_utils.testing:SubprocessCallException", ("text",))
row(
    "test_utils.testing:are_the_same_tensors", lambda: accelerated(torch.ones(2)),
    lambda: accelerated(torch.tensor(True)),
)  # fmt: skip
row("test_utils.testing:assert_exception", (ValueError,), (ValueError, "text"))
row("test_utils.testing:capture_call_output", (print, "a"), (print, 1, 2, with_(sep="-")))
row("test_utils.testing:get_backend", ())
row("test_utils.testing:get_launch_command", (), (with_(num_processes=2, multi_gpu=True),))
row("test_utils.testing:path_in_accelerate_package", (), ("test_utils", "scripts"), ("no",))
row("test_utils.testing:get_torch_dist_unique_port", ())
row("test_utils.testing:parse_flag_from_env", ("SOME_FLAG",), ("SOME_FLAG", True))
row("test_utils.testing:pytest_xdist_worker_id", ())
row("test_utils.testing:require_torch_min_version", (len, "1.0"), (len, "99"))
row("test_utils.training:RegressionDataset", (2, 3, 4, 1), ())
row("test_utils.training:RegressionModel", (1, 2), (1, 2, True))
for name_ in ("mocked_dataloaders", "mocked_dataloaders_for_autoregressive_models"):
    row(f"test_utils.training:{name_}", (None,))
row("test_utils.testing:run_command", ([sys.executable, "-c", "print(1)"], True), ([sys.executable, "-c", "exit(3)"],))
row(
    "test_utils.testing:execute_subprocess_async",
    *(([sys.executable, "-c", program], None, None, 60, True, False) for program in ("print(1)", "exit(2)")),
)
row("test_utils.examples:clean_lines", (["a\n", "# b\n", "\n", "  c # d\n"],))
row("test_utils.examples:compare_against_test", ("no.py", "such.py", True), ("no.py", "such.py", False, "file.py"))
row("logging:get_logger", ("name",), ("name", "DEBUG"), ("name", "what"))
row("logging:MultiProcessAdapter", (logging.getLogger("name"), {}))
row("optimizer:move_to_device", ({"a": torch.ones(2), "b": [torch.ones(1)]}, "meta"), (1, "cpu"))
row("tracking:GeneralTracker", ())
row("tracking:filter_trackers", ([],), (["tensorboard"],), (["what"], "."), ("all", "."), state=True)
row("tracking:get_available_trackers", ())
row("tracking:register_tracker_class", (dict,), (None,))
for name_ in ("compile_regions", "compile_regions_fsdp2"):
    row(f"utils.other:{name_}", (Own(),), (nn.Linear(1, 1),))
row("utils.other:compile_regions_deepspeed", (Own(),))


@probe("utils.other:get_free_port")
def free_port():
    port = other.get_free_port()
    return 1024 <= port < 65536, other.is_port_in_use(port)


@probe(
    "utils.dataclasses:BaseEnum", "utils.dataclasses:EnumWithContains", item=["a", "FIRST", "b", 1, None, [], "own"]
)
def own_enumeration(item):
    own = dataclasses.BaseEnum("Own", {"FIRST": "a"})
    item = own.FIRST if item == "own" else item
    yield "member", attempt(lambda: item in own)
    yield "made", attempt(own, item)
    yield "text", [str(own.FIRST), own.list()]
