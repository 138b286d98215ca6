"""What is wrong with a configuration although each of its values, taken alone, is of the right type."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.commands.config import words
from accelerate.config.options import BY_NAME, FEATURES, NEEDS_DEVICES, PARADIGMS, SECTIONS
from accelerate.launch.config_file import FileSettings, Inspection, Problem, nearest


def check(found: Inspection) -> tuple[list[Problem], list[str]]:
    """Return the problems of a configuration file, and notes about what has no effect.

    Args:
        found: the file, as `accelerate.launch.config_file.inspect` read it.
    """
    settings = found.settings
    problems = list(found.problems)
    sagemaker = str(found.content.get("compute_environment")) == "AMAZON_SAGEMAKER"
    for name, text in [*_words(settings.values), *(() if sagemaker else _contradictions(settings.values))]:
        problems.append(Problem(text, settings.lines.get(name), fatal=False))
    for name, text in _missing_files(settings.values):
        problems.append(Problem(text, settings.lines.get(name), fatal=False))
    notes = [*found.notes, *_without_effect(settings)]
    if "distributed_type" not in found.content:
        notes.append("distributed_type is missing; NO is taken for it, but other readers of such files insist on it.")
    return sorted(problems, key=lambda problem: problem.line or 0), notes


def _words(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, known in words.WORDS.items():
        value = values.get(name)
        if value is None or name in words.OPEN or str(value).upper() in [word.upper() for word in known]:
            continue
        if name.startswith("fsdp_") and str(value).isdecimal() and 1 <= int(value) <= len(known):
            continue  # older releases wrote the number of the word
        near = nearest(str(value), known)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(known)}."
        yield name, f"{_key(name)} is {str(value)[:80]!r}; {hint}"
    for name in words.TRUTHS:
        value = values.get(name)
        if value is not None and str(value).lower() not in ("true", "false", "1", "0", "yes", "no"):
            yield name, f"{_key(name)} is {str(value)[:80]!r}; write true or false."


def _contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machines, processes = values.get("num_machines", 1), values.get("num_processes")
    for name in NEEDS_DEVICES:
        if values.get(name) and values.get("cpu"):
            kind = "TPUs" if name == PARADIGMS[1] else "GPUs"
            yield "cpu", f"use_cpu is true, and distributed_type asks for {kind}; MULTI_CPU is the type for CPUs."
    if machines < 1:
        yield "num_machines", f"num_machines is {machines}; it must be at least 1."
    elif machines > 1:
        rank = values.get("machine_rank", 0)
        if not 0 <= rank < machines:
            yield "machine_rank", f"machine_rank is {rank}, and num_machines is {machines}; ranks start at 0."
        if values.get("main_process_ip") is None:
            yield (
                "num_machines",
                f"num_machines is {machines}, and main_process_ip, the address of machine 0, is missing.",
            )
        if processes is not None and processes % machines:
            yield "num_processes", f"num_processes is {processes}, which {machines} machines cannot share evenly."
    port = values.get("main_process_port")
    if port is not None and not 0 <= port <= 65535:
        yield "main_process_port", f"main_process_port is {port}; ports are numbers from 0 to 65535."
    ids = [part.strip() for part in str(values.get("gpu_ids", "all")).split(",")]
    if ids != ["all"] and len(set(ids)) < len(ids):
        yield "gpu_ids", f"gpu_ids is {values['gpu_ids']!r}; it names a device twice."
    elif ids != ["all"] and processes is not None and values.get("multi_gpu") and len(ids) * machines < processes:
        yield "gpu_ids", f"gpu_ids names {len(ids)} devices for {processes // machines} processes of a machine."
    product = 1
    for name, value in values.items():
        if name.startswith("parallelism_config_") and name.endswith("_size"):
            product *= max(value, 1)
    if processes is not None and processes % product:
        yield "num_processes", f"num_processes is {processes}, and the sizes in parallelism_config need {product}."


def _missing_files(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("deepspeed_config_file", "deepspeed_hostfile", "mpirun_hostfile", "command_file"):
        path = values.get(name)
        if path and not os.path.isfile(os.path.expanduser(path)):
            yield name, f"{_key(name)} is {path!r}; there is no such file (seen from {os.getcwd()})."


def _without_effect(settings: FileSettings) -> Iterator[str]:
    values = {name: option.default for name, option in BY_NAME.items()} | dict(settings.values)
    for section, feature in SECTIONS.items():
        if feature is None or FEATURES[feature].is_on(values[FEATURES[feature].switch]):
            continue
        if any(BY_NAME[name].section == section for name in settings.values):
            yield f"{section} has no effect without {FEATURES[feature].request}, or the distributed_type that says so."


def _key(name: str) -> str:
    option = BY_NAME[name]
    return f"{option.section}.{option.file_key}" if option.section else str(option.file_key)
