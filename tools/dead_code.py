"""Code that nothing uses, found by vulture: `python tools/dead_code.py` names it and fails.

Tests do not count as users: what only a test calls is dead. These do: the package itself, the examples and tools, the recorded
interface of upstream and of downstream libraries (tests/architecture/record), and what a page of docs/ names. `CALLED` has the rest.
"""

import pathlib
import re
import sys

import vulture

ROOT = pathlib.Path(__file__).resolve().parents[1]
USERS = ["src", "examples", "tools", "benchmarks"]
# Names that others call, and who does.
CALLED: dict[str, str] = {
    "__notes__": "read by `traceback.TracebackException.format_exception_only`",
    **dict.fromkeys(["memo", "objtype", "protocol"], "Python: parameters of __deepcopy__, __get__ and __reduce_ex__"),
    "align": "numpy: what its pickles pass to a dtype",
    **dict.fromkeys(["persistent_id", "persistent_load", "reducer_override"], "Python: pickle"),
    **dict.fromkeys(["writable", "seekable"], "Python: io.BufferedWriter, io.BufferedReader"),
    **dict.fromkeys(["_missing_", "__dir__", "find_class", "__signature__"], "Python: enum, dir(), pickle, inspect"),
    **dict.fromkeys(["load_bytes", "create_stream", "fs"], "torch.distributed.checkpoint"),
    "_load_from_address": "torchft: its transport of states over HTTP",
    "main_hook": "torch.distributed.algorithms.join",
    **dict.fromkeys(
        ["next_rendezvous", "num_nodes_waiting", "_assign_worker_ranks", "_exit_barrier"], "torch's elastic launcher"
    ),
    **dict.fromkeys(["_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP"], "DeepSpeed: its groups of ranks"),
    **dict.fromkeys(["is_decoupled"], "DeepSpeed: asked of what writes its checkpoints"),
    **dict.fromkeys(
        ["get_lst_from_rank0", "assert_lst_len_same_as_other_ranks"], "DeepSpeed: how ZeRO 3 compares ranks"
    ),
    **dict.fromkeys(["Version"], "annotations in quotes"),
    **dict.fromkeys(["allow_tf32", "activation_relu_or_gelu", "enable_load_balance"], "torch: settings"),
    **dict.fromkeys(
        [
            *["checkpoint_command_parser", "diagnose_command_parser", "plan_command_parser", "stacks_command_parser"],
        ],
        "our registries, which hold names",
    ),
    **dict.fromkeys(["_accelerate_loaded"], "ours, through __dict__"),
    **dict.fromkeys(["state_exists"], "the patch that tools/upstream_patches writes"),
    **dict.fromkeys(["batches_yielded"], "tests of resume, which see by it the position of a loader"),
    **dict.fromkeys(["_render_traceback_", "__test__"], "IPython, pytest"),
    **dict.fromkeys(["CB", "bnb_quantized", "support_avx512bf16_for_cpu"], "bitsandbytes"),
    **dict.fromkeys(
        ["on_step_begin", "on_step_end", "on_epoch_end", "on_evaluate"], "transformers: events of its callbacks"
    ),
    **dict.fromkeys(["dschf", "DDP_impl"], "transformers (kept alive for it), Megatron-LM"),
    **dict.fromkeys(
        [
            "finalize_model_grads_func",
            "grad_scale_func",
            "no_sync_func",
            "input_layernorm",
            "pre_mlp_layernorm",
            "init_state_fn",
        ],
        "Megatron core reads them",
    ),
    **dict.fromkeys(["global_batch_size", "dataset_args"], "users of Megatron-LM read them"),
    **dict.fromkeys(
        [
            *[
                "has_fp8_handler",
                "delayed_fp8_autocast",
                "hf_cache_home",
                "param_original_devices",
                "buffer_original_devices",
            ],
            *["pippy_stage", "user_provided_run_name", "active_run"],
            *["is_musa_available", "is_sdaa_available", "is_neuron_available"],
        ],
        "users: names that upstream has",
    ),
}


def identifiers(text: str) -> set[str]:
    """Return every word of a text that could be a name."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def main() -> int:
    """Print what is unused, a line each, and return how many there are."""
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tests" / "architecture" / "record").glob("*.json")]
    package = ROOT / "src" / "accelerate"
    specs = [package / "config" / "strategies.py", *(package / "extensions").glob("*/__init__.py")]
    # Named by "module:name", and imported when they are used.
    classes = [name for path in specs for name in re.findall(r'"[^"\s]+:(\w+)"', path.read_text("utf-8"))]
    used = set(CALLED).union(classes, *(identifiers(path.read_text("utf-8")) for path in documents))
    found = vulture.Vulture(ignore_decorators=["@_check"])  # which puts the checks of `accelerate test` into a list
    found.scavenge([ROOT / folder for folder in USERS])
    lines = [
        f"{pathlib.Path(item.filename).relative_to(ROOT)}:{item.first_lineno}: unused {item.typ} {item.name}"
        for item in found.get_unused_code(min_confidence=60)
        if item.name not in used and str(item.filename).startswith(str(ROOT / "src"))
    ]
    print(*lines, sep="\n")
    return len(lines)


if __name__ == "__main__":
    sys.exit(bool(main()))
