"""Comparisons of what `accelerate launch` reads, decides, exports and starts, and of `accelerate.launchers`."""

import sys

from accelerate.commands import launch
from interop.differential.core import Words, call, probe, record, words


def listed(text):
    return text.split()


PARSER = launch.launch_command_parser()
PLAIN = vars(PARSER.parse_args(["s.py"]))
OWN = {"dry_run", "func", "simulate"}
OWN |= {f"simulate_{name}" for name in ("rank", "steps", "shapes_only", "report")}
PRECISIONS = ["no", "fp16", "bf16", "fp8", "FP16", "BF16", "fp32", "int8", ""]
BACKENDS = words(
    "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt tvm INDUCTOR EAGER NO "
    "unknown aot_torchxla_trace_once torhchxla_trace_once", ""
)  # fmt: skip
FREE = ["x", "X Y", "ü", ""]
BOOLS = ["true", "false", "True", "FALSE", "1", "0", "yes", "no", "x", ""]
INTEGERS = ["0", "1", "2", "-1", "007", "1_0", "99999999999999999999", "1.0", "x", ""]
FLOATS = ["0", "1.5", "-1", "1e3", "nan", "inf", "x", ""]
OF_TYPE = {"int": INTEGERS, "float": FLOATS, "bool": BOOLS, "str_to_bool": BOOLS, "str": FREE, None: FREE}
ARGUMENTS = record("cli")["commands"]["launch"]["arguments"]
OPTIONS = {
    **{a["dest"]: OF_TYPE.get(a["type"]) for a in ARGUMENTS if a["options"] and a["nargs"] is None},
    "mixed_precision": PRECISIONS, "dynamo_backend": BACKENDS,
    "dynamo_mode": ["default", "reduce-overhead", "max-autotune", "DEFAULT", "x", ""],
    "fp8_backend": ["ao", "te", "msamp", "TE", "x", ""], "fp8_format": ["E4M3", "E5M2", "HYBRID", "hybrid", "x", ""],
    "fp8_amax_compute_algo": ["max", "most_recent", "MAX", "x", ""], "fp8_opt_level": ["O1", "O2", "O3", "o1", ""],
    "fp8_override_linear_precision": ["true,false,true", "(True, False, True)", "1,0,1", "true", "x", "", "True,True"],
    "fsdp_version": ["1", "2", "3", "", "one"], "parallelism_config_cp_backend": ["torch", "TORCH", "x", ""],
    "parallelism_config_sp_backend": ["deepspeed", "DEEPSPEED", "x", ""],
}  # fmt: skip


def parsed(*words):
    """Return what the parser makes of a command line, without this package's own options."""
    args = PARSER.parse_args(list(words))
    for name in OWN:
        vars(args).pop(name, None)
    return args


def simple(attributes):
    """Return attributes in order, where 1 and True are the same, without what only the launcher reads."""
    found = {k: attributes[k] for k in sorted(attributes) if k not in OWN}
    for name in ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"):
        found[name] = bool(found[name])
    found["fp8_override_linear_precision"] = [bool(v) for v in found["fp8_override_linear_precision"]]
    found["nondefault"] = found.get("nondefault", set()) - {"vm", "env"}
    return found


def changed(args):
    now, plain = simple(vars(args)), simple(PLAIN)
    return {
        **{k: v for k, v in now.items() if plain.get(k, "<absent>") != v},
        **{k: "<absent>" for k in plain if k not in now},
    }


def options(given):
    """Give a value as one word or as two, in one of the two spellings."""
    name, _, value = given.partition("=")
    words = [f"--{name}", value] if len(given) % 2 else [f"--{name.replace('_', '-')}={value}"]
    return changed(parsed(*words, "s.py"))


probe(
    "commands.launch:launch_command_parser",
    given=Words([f"{name}={value}" for name, values in OPTIONS.items() for value in values]),
)(options)
call("commands.launch:clean_option", option=words("--a-b --a_b -a a-b -- --A-B ---x --a=b-c", ""))


@probe(
    "commands.launch:CustomHelpFormatter",
    line=[
        "launch", "launch --use_fsdp", "launch --use-deepspeed", "launch --tpu --help", "launch --use_megatron_lm",
        "launch --fsdp_version 2", "launch --use_fsdp --use_deepspeed", "launch --cpu",
    ],
)  # fmt: skip
def help_formatter(line):
    """Show which of a parser's options the help has, by group."""
    sys.argv[:] = ["accelerate", *line.split()]
    text = PARSER.format_help()
    for word in ("--fsdp_version", "--zero_stage", "--tpu_use_sudo", "--megatron_lm_tp_degree", "--num_processes", "--cpu", "--fp8_margin", "--aws_access_key_id"):  # fmt: skip
        yield word, any(f" {word}" in row for row in text[text.index("training_script") :].splitlines())
