"""Variables of the environment, and what the machine says."""

import asyncio
import os

from accelerate.utils import environment
from interop.differential.core import attempt, call, probe


@probe(
    "utils.environment:purge_accelerate_environment", kind=["function", "class", "subclass", "coroutine", "generator"],
    fails=[False, True],
)  # fmt: skip
def purge_accelerate_environment(kind, fails):
    os.environ["ACCELERATE_KEPT"] = "old"

    def body(*args):
        """Change variables."""
        os.environ.update(ACCELERATE_KEPT="new", ACCELERATE_ADDED="1", PROBED="1")
        if fails:
            raise ValueError("x")
        return "done"

    async def coroutine():
        return body()

    def generator():
        yield body()

    class Case:
        def test_it(self):
            return body()

        def other(self):
            return "untouched"

    purge = environment.purge_accelerate_environment
    if kind == "subclass":
        parent = purge(Case)

        class Derived(parent):
            def test_more(self):
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
    "utils.environment:get_gpu_info", "utils.environment:get_driver_version",
    "utils.environment:check_cuda_p2p_ib_support", "utils.environment:get_current_device_type",
    function=["get_gpu_info", "get_driver_version", "check_cuda_p2p_ib_support", "get_current_device_type"],
)  # fmt: skip
def without_nvidia(function):
    os.environ["PATH"] = os.getcwd()
    return getattr(environment, function)()


call("utils.environment:check_cuda_fp8_capability")
RANKS = ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"]
SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]
LOCALS = ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"]
LOCAL_SIZES = ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"]


@probe(
    "utils.environment:get_cpu_distributed_information", "utils.environment:CPUInformation",
    name=[*RANKS, *SIZES, *LOCALS, *LOCAL_SIZES, "NOTHING"], value=["0", "3", "-1", "x", ""],
    beside=[{}, {"PMI_RANK": "5", "OMPI_COMM_WORLD_SIZE": "9"}],
)  # fmt: skip
def get_cpu_distributed_information(name, value, beside):
    os.environ.update({**beside, name: value})
    return environment.get_cpu_distributed_information()
