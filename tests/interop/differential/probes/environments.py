"""Variables of the environment, and what the machine says."""

import asyncio
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from accelerate import PartialState
from accelerate.utils import environment
from interop.differential.core import Words, attempt, call, probe

TRUTHS = Words(
    [
        "y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0", "YES", "True", "FALSE", "Off", "",
        "2", "maybe", " true", "true ", "-1", "None", "ja", "1.0",
    ],
)  # fmt: skip


call("utils.environment:str_to_bool", value=TRUTHS, to_bool=[False, True, None])


@probe(
    "utils.environment:parse_flag_from_env",
    "utils.environment:parse_choice_from_env",
    function=["parse_flag_from_env", "parse_choice_from_env"],
    default=["left out", True, False, None, "yes", "", 1, "no", "whatever", 0.5],
)
def parse_absent(function: str, default: Any) -> Any:
    return getattr(environment, function)("PROBED", *([] if default == "left out" else [default]))


@probe("utils.environment:get_int_from_env", keys=[[], (), "PROBED", ["PROBED"], None])
def get_int_from_env_keys(keys: Any) -> Any:
    return environment.get_int_from_env(keys, 3)


@probe(
    "utils.environment:patch_environment", value=["x", "", 1, True, None, 1.5, ["a"], "ü"], before=[None, "old"],
    name=["PROBED", "probed", "Probed_2"], fails=[False, True],
)  # fmt: skip
def patch_environment(value: Any, before: Any, name: str, fails: bool) -> Iterator[tuple[str, Any]]:
    if before is not None:
        os.environ[name.upper()] = before

    def look() -> Any:
        return {k: os.environ[k] for k in sorted(os.environ) if k.upper().startswith("PROBED")}

    try:
        with environment.patch_environment(**{name: value}):
            yield "inside", look()
            os.environ["PROBED_LATER"] = "1"
            if fails:
                raise KeyError("x")
    except KeyError as error:
        yield "raised", error
    yield "after", look()


@probe("utils.environment:clear_environment", fails=[False, True])
def clear_environment(fails: bool) -> Iterator[tuple[str, Any]]:
    before = dict(os.environ)
    try:
        with environment.clear_environment():
            yield "inside", dict(os.environ)
            os.environ["PROBED"] = "1"
            if fails:
                raise ValueError
    except ValueError as error:
        yield "raised", error
    yield (
        "after",
        {k: v for k, v in os.environ.items() if before.get(k) != v} | {"lost": sorted(set(before) - set(os.environ))},
    )


@probe(
    "utils.environment:purge_accelerate_environment",
    kind=["function", "class", "subclass", "coroutine", "generator"],
    fails=[False, True],
)
def purge_accelerate_environment(kind: str, fails: bool) -> Iterator[tuple[str, Any]]:
    os.environ["ACCELERATE_KEPT"] = "old"

    def body(*args: Any) -> str:
        """Change variables."""
        os.environ.update(ACCELERATE_KEPT="new", ACCELERATE_ADDED="1", PROBED="1")
        if fails:
            raise ValueError("x")
        return "done"

    async def coroutine() -> str:
        return body()

    def generator() -> Any:
        yield body()

    class Case:
        def test_it(self) -> str:
            return body()

        def other(self) -> str:
            return "untouched"

    purge = environment.purge_accelerate_environment
    if kind == "subclass":
        parent = purge(Case)

        class Derived(parent):
            def test_more(self) -> str:
                return body()

        call = Derived().test_more
    else:
        call = {
            "function": lambda: purge(body)(),
            "class": lambda: purge(Case)().test_it(),
            "coroutine": lambda: asyncio.run(purge(coroutine)()),
            "generator": lambda: list(purge(generator)()),
        }[kind]
    yield "result", attempt(call)
    yield "after", {k: v for k, v in os.environ.items() if k in ("ACCELERATE_KEPT", "ACCELERATE_ADDED", "PROBED")}
    yield "name", (purge(body).__name__, purge(body).__doc__, purge(Case).__name__)


@probe(
    "utils.environment:convert_dict_to_env_variables",
    current_env=[
        *(
            {}, {"A": "1"}, {"A": "1", "B": "x y"}, {"A": ""}, {"A": None}, {"A": 1}, {"A B": "1"}, {"": "x"},
            {"a": "b;c"}, {"A": "x\ny"},
        ),
        *(
            {"A": "<x>"}, {"A": "$HOME"}, {"A": "'q'"}, {"A-B": "1"}, {"A": "a=b"}, {"1A": "x"}, {"Ä": "ö"},
            {"A": "tab\t"}, {"A": True}, {"PATH": "/a:/b"},
        ),
        *({"A;B": "1"}, {"A=B": "1"}, {"A": '"q"'}, {"A": "#"}, {"A.B": "1"}, None, []),
    ],
)  # fmt: skip
def convert_dict_to_env_variables(current_env: Any) -> Any:
    PartialState(cpu=True)
    return environment.convert_dict_to_env_variables(current_env)


@probe(
    "utils.environment:are_libraries_initialized",
    names=[
        (), ("torch",), ("numpy", "torch"), ("no_such",), ("torch", "no_such"), ("torch.nn",), ("",), (None,),
        (["torch"],),
    ],
)  # fmt: skip
def are_libraries_initialized(names: Any) -> Any:
    return environment.are_libraries_initialized(*names)


@probe(
    "utils.environment:get_gpu_info", "utils.environment:get_driver_version",
    "utils.environment:check_cuda_p2p_ib_support", "utils.environment:get_current_device_type",
    function=["get_gpu_info", "get_driver_version", "check_cuda_p2p_ib_support", "get_current_device_type"],
)  # fmt: skip
def without_nvidia(function: str) -> Any:
    os.environ["PATH"] = os.getcwd()
    return getattr(environment, function)()


call("utils.environment:check_cuda_fp8_capability")


@probe("utils.environment:set_numa_affinity", index=[0, 1, -1, None, [1]], verbose=[None, True])
def set_numa_affinity(index: Any, verbose: Any) -> Any:
    before = os.sched_getaffinity(0)
    return environment.set_numa_affinity(index, verbose=verbose), os.sched_getaffinity(0) == before


@probe("utils.environment:override_numa_affinity", index=[0, 1, -1, None, "x"], verbose=[None, True, False])
def override_numa_affinity(index: Any, verbose: Any) -> Iterator[tuple[str, Any]]:
    before = os.sched_getaffinity(0)
    yield "result", attempt(lambda: environment.override_numa_affinity(index, verbose))
    yield "unchanged", os.sched_getaffinity(0) == before


RANKS = ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"]
SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]
LOCALS = ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"]
LOCAL_SIZES = ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"]


@probe(
    "utils.environment:get_cpu_distributed_information", "utils.environment:CPUInformation",
    name=[*RANKS, *SIZES, *LOCALS, *LOCAL_SIZES, "NOTHING"], value=["0", "3", "-1", "x", ""],
    beside=[{}, {"PMI_RANK": "5", "OMPI_COMM_WORLD_SIZE": "9"}],
)  # fmt: skip
def get_cpu_distributed_information(name: str, value: str, beside: Any) -> Any:
    os.environ.update({**beside, name: value})
    return environment.get_cpu_distributed_information()


def with_nvidia_smi(gpus: list[str], driver: str, code: int) -> None:
    """Put a program of this name on the path that knows the fields `count`, `name` and `driver_version`."""
    lines = [{"count": str(len(gpus)), "name": name, "driver_version": driver} for name in gpus]
    program = pathlib.Path("bin/nvidia-smi")
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable} -S\nimport sys\nfor line in {lines!r}:\n"
        "    print(', '.join(line[field] for field in sys.argv[1].partition('=')[2].split(',')))\n"
        f"sys.exit({code})\n"
    )
    program.chmod(0o755)
    os.environ["PATH"] = f"{os.path.abspath('bin')}:/usr/bin:/bin"


@probe(
    "utils.environment:get_gpu_info",
    "utils.environment:get_driver_version",
    "utils.environment:check_cuda_p2p_ib_support",
    function=["get_gpu_info", "get_driver_version", "check_cuda_p2p_ib_support"],
    gpus=[
        ["NVIDIA A100-SXM4-80GB"],
        ["NVIDIA A100", "NVIDIA A100"],
        ["NVIDIA GeForce RTX 4090"] * 2,
        ["NVIDIA GeForce RTX 4090"],
        [],
    ],
    driver=["550.40.07", "535.1", "", "odd"],
    code=[0, 1],
)
def nvidia(function: str, gpus: list[str], driver: str, code: int) -> Any:
    if code and driver != "535.1":
        return None
    with_nvidia_smi(gpus, driver, code)
    return getattr(environment, function)()
