"""Spellings of configuration files that older releases wrote, and what they are called today."""

from typing import Any

# Keys of files that other programs generate.
_NEVER_READ = ("downcase_fp16", "downcast_fp16")
_OLD_TYPES = {"TPU": "XLA", "MPS": "NO"}
_OLD_PREFETCH, _PREFETCH = "fsdp_backward_prefetch_policy", "fsdp_backward_prefetch"


def modernise(new: dict[str, Any], notes: list[str]) -> None:
    """Replace the old spellings in the content of a file; `notes` receives a line for each."""
    if "fp16" in new:
        half = new.pop("fp16")
        new.setdefault("mixed_precision", "fp16" if half and str(half).lower() not in ("no", "false") else "no")
        notes.append("fp16 is now mixed_precision: fp16.")
    if "dynamo_backend" in new:
        backend = new.pop("dynamo_backend")
        new["dynamo_config"] = {} if backend in (None, "NO", "no", False) else {"dynamo_backend": backend}
        if new["dynamo_config"]:
            notes.append("dynamo_backend is now a key of dynamo_config.")
    kind = new.get("distributed_type")
    if isinstance(kind, str) and kind in _OLD_TYPES:
        new["distributed_type"] = _OLD_TYPES[kind]
        notes.append(f"distributed_type: {kind} is now {_OLD_TYPES[kind]}.")
    for key in [key for key in _NEVER_READ if key in new]:
        del new[key]
        notes.append(f"{key} has no effect: no version of Accelerate reads this key. Remove it.")
    ipex = new.pop("ipex_config", None)
    if isinstance(ipex, dict) and any(ipex.values()):
        notes.append("ipex_config has no effect: current versions of torch carry the speedups of Intel's extension.")
    fsdp = new.get("fsdp_config")
    if isinstance(fsdp, dict) and _OLD_PREFETCH in fsdp:
        new["fsdp_config"] = {_PREFETCH if key == _OLD_PREFETCH else key: value for key, value in fsdp.items()}
        notes.append(f"fsdp_config.{_OLD_PREFETCH} is now {_PREFETCH}.")
    dynamo = new.get("dynamo_config")
    if isinstance(dynamo, dict) and str(dynamo.get("dynamo_backend")).upper() == "AOT_CUDAGRAPHS":
        new["dynamo_config"] = {**dynamo, "dynamo_backend": "CUDAGRAPHS"}


MODERNISERS = (modernise,)
