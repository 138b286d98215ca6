"""What is wrong with a configuration although each of its values, taken alone, is of the right type."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.config.options import NEEDS_DEVICES, OPTIONS, PARADIGMS, Option
from accelerate.config.options.schema import TRUE_OR_FALSE, existing_file, json_file
from accelerate.launch.config_file import Inspection, Problem, nearest


def check(found: Inspection) -> tuple[list[Problem], list[str]]:
    """Return the problems of a configuration file, and notes.

    Args:
        found: the file, as `accelerate.launch.config_file.inspect` read it.
    """
    settings = found.settings
    faults = [*_faults_of_values(settings.values)]
    if str(found.content.get("compute_environment")) != "AMAZON_SAGEMAKER":
        faults += contradictions(settings.values)
        if settings.values.get("num_machines", 1) > 1 and settings.values.get("main_process_ip") is None:
            count = settings.values["num_machines"]
            text = f"num_machines is {count}, and main_process_ip, the address of machine 0, is missing."
            faults.append(("num_machines", text))
    problems = [*found.problems, *(Problem(text, settings.lines.get(name), fatal=False) for name, text in faults)]
    missing = "distributed_type is missing; NO is taken for it, but other readers of such files insist on it."
    notes = [*found.notes, *([] if "distributed_type" in found.content else [missing])]
    return sorted(problems, key=lambda problem: problem.line or 0), notes


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that others rule out, each with the reason; the interview refuses such answers.

    Args:
        values: option name to value; what is missing contradicts nothing.
    """
    machines, processes = values.get("num_machines", 1), values.get("num_processes")
    for name in NEEDS_DEVICES:
        if values.get(name) and values.get("cpu"):
            kind = "TPUs" if name == PARADIGMS[1] else "GPUs"
            yield "cpu", f"use_cpu is true, and distributed_type asks for {kind}; MULTI_CPU is the type for CPUs."
    rank = values.get("machine_rank", 0)
    if machines > 1 and not 0 <= rank < machines:
        yield "machine_rank", f"machine_rank is {rank}, and num_machines is {machines}; ranks start at 0."
    port = values.get("main_process_port")
    if port is not None and not 0 <= port <= 65535:
        yield "main_process_port", f"main_process_port is {port}; ports are numbers from 0 to 65535."
    ids = [part.strip() for part in str(values.get("gpu_ids", "all")).split(",")]
    if ids != ["all"] and len(set(ids)) < len(ids):
        yield "gpu_ids", f"gpu_ids is {values['gpu_ids']!r}; it names a device twice."
    elif ids != ["all"] and processes is not None and not values.get("cpu") and len(ids) * machines < processes:
        yield "gpu_ids", f"gpu_ids names {len(ids)} devices for {processes // machines} processes of a machine."
    if processes is not None and processes % machines:
        yield "num_processes", f"num_processes is {processes}, which {machines} machines cannot share evenly."
    needed = parallel_size(values)
    if processes is not None and processes % needed:
        yield "num_processes", f"num_processes is {processes}, and the sizes in parallelism_config need {needed}."


def parallel_size(values: Mapping[str, Any]) -> int:
    """Return how many processes the sizes of the parallelism need; a run has as many, or a multiple."""
    return math.prod(
        max(value, 1) for name, value in values.items() if re.fullmatch("parallelism_config_.*_size", name)
    )


def _faults_of_values(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for option in OPTIONS:
        value = values.get(option.name)
        if value in (None, ""):
            continue
        opens = option.check in (existing_file, json_file)
        fault = option.check(value) if opens else _fault_of_word(option, str(value))
        if fault:
            key = f"{option.section}.{option.file_key}" if option.section else option.file_key
            yield option.name, f"{key} is {str(value)[:80]!r}; {fault}"


def _fault_of_word(option: Option, value: str) -> str | None:
    if not option.words or option.open or option.choices:
        return None
    if option.words == TRUE_OR_FALSE:
        return None if value.lower() in ("true", "false", "1", "0", "yes", "no") else "write true or false."
    if value.upper() in [word.upper() for word in option.words]:
        return None
    if option.feature == "fsdp" and value.isdecimal() and 1 <= int(value) <= len(option.words):
        return None  # older releases wrote the number of the word
    near = nearest(value, option.words)
    return f"did you mean {near}?" if near else f"choose one of {', '.join(option.words)}."
