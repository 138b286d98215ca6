"""The questions about machines of one's own, and the words they accept."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.commands.config import cluster_steps as steps
from accelerate.commands.config.ask import Asker
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS
from accelerate.commands.config.interview import Interview, Step, at_least, content
from accelerate.config.enums import ComputeEnvironment
from accelerate.launch import hardware
from accelerate.utils.constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
    TORCH_DYNAMO_MODES,
)

__all__ = [
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DYNAMO_BACKENDS",
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "TORCH_DYNAMO_MODES",
    "ask_cluster",
    "get_cluster_input",
]

_PLAIN, _FSDP, _DEEPSPEED, _MEGATRON = "plain", "fsdp", "deepspeed", "megatron"
_ENGINES = {
    _PLAIN: ("Plain data parallelism: a whole model in every process", None),
    _FSDP: ("FSDP: the model is sharded over the processes", "FSDP"),
    _DEEPSPEED: ("DeepSpeed", "DEEPSPEED"),
    _MEGATRON: ("Megatron-LM", "MEGATRON_LM"),
}
_STATIC_PORT = 29500


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        title: how it is offered.
        word: what the file says as `distributed_type`, unless an engine says it.
        device: torch's name of the devices that it needs; None for a run that any machine can do.
        unit: what one of them is called.
        engines: what can run on it.
    """

    title: str
    word: str
    device: str | None = None
    unit: str = "process"
    engines: tuple[str, ...] = (_PLAIN,)


_SHARDED = (_PLAIN, _FSDP, _DEEPSPEED)
KINDS: tuple[Kind, ...] = (
    Kind("No distributed training: one process", "NO"),
    Kind("Several processes on CPUs", "MULTI_CPU", engines=_SHARDED),
    Kind("XPUs of Intel", "MULTI_XPU", "xpu", "XPU", _SHARDED),
    Kind("Gaudi processors of Intel (HPU)", "MULTI_HPU", "hpu", "HPU", _SHARDED),
    Kind("GPUs of NVIDIA or AMD", "MULTI_GPU", "cuda", "GPU", (*_SHARDED, _MEGATRON)),
    Kind("NPUs of Ascend", "MULTI_NPU", "npu", "NPU", _SHARDED),
    Kind("MLUs of Cambricon", "MULTI_MLU", "mlu", "MLU", _SHARDED),
    Kind("SDAA devices of Tecorigin", "MULTI_SDAA", "sdaa", "device", _SHARDED),
    Kind("MUSA GPUs of Moore Threads", "MULTI_MUSA", "musa", "GPU", _SHARDED),
    Kind("Trainium and Inferentia cores of AWS (Neuron)", "MULTI_NEURON", "neuron", "core", _SHARDED),
    Kind("TPUs of Google", "XLA", "xla", "core"),
)
_BY_WORD = {kind.word: kind for kind in KINDS}


def get_cluster_input() -> ClusterConfig:
    """Ask for the settings of machines of one's own.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return ask_cluster(Asker())


def ask_cluster(asker: Asker, previous: Mapping[str, Any] | None = None, was: str | None = None) -> ClusterConfig:
    """Ask for the settings of machines of one's own.

    Args:
        asker: asks.
        previous: option name to value, of the file that is replaced; they become the defaults.
        was: its `distributed_type`.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    talk = Interview(asker, hardware.detect(os.environ), previous or {})
    kind = _ask_kind(talk, was)
    alone, tpu = kind is _BY_WORD["NO"], kind is _BY_WORD["XLA"]
    if alone:
        talk.ask("cpu")
    else:
        talk.values["cpu"] = kind is _BY_WORD["MULTI_CPU"]
        _ask_machines(talk, tpu)
    engine = _ask_engine(talk, kind, was)
    _ask_compilation(talk)
    _ask_engine_settings(talk, engine)
    if kind is _BY_WORD["MULTI_CPU"]:
        _ask_mpi(talk)
    if tpu:
        _ask_tpu(talk)
    if alone:
        talk.values["num_processes"] = 1
        if kind.device is None and not talk.values["cpu"] and talk.machine.count > 1:
            talk.ask(Step("gpu_ids", "all", check=_check_ids))
    else:
        _ask_processes(talk, kind)
    _ask_precision(talk, tpu)
    if not alone:
        talk.ask("debug")
    found = content(talk.values)
    return ClusterConfig(
        **{
            "compute_environment": ComputeEnvironment.LOCAL_MACHINE,
            "distributed_type": _ENGINES[engine][1] or kind.word,
            "debug": False,
            **found,
        }
    )


def _ask_kind(talk: Interview, was: str | None) -> Kind:
    here = next((kind for kind in KINDS if kind.device == talk.machine.device and talk.machine.count), KINDS[0])
    default = _BY_WORD.get(was or "", here)
    kind = KINDS[talk.asker.choose("On what should the training run?", [k.title for k in KINDS], KINDS.index(default))]
    if kind.device is not None and kind.device != talk.machine.device:
        talk.asker.say(
            f"  Note: this machine shows no {kind.unit} of that kind, so `accelerate launch` will refuse such a run here. "
            "The file can be right for another machine."
        )
    return kind


def _ask_machines(talk: Interview, tpu: bool) -> None:
    if tpu:
        talk.values["num_machines"] = 1
        return
    count = talk.ask(Step("num_machines", 1, check=at_least(1)))
    if count == 1:
        return
    talk.ask(Step("machine_rank", 0, check=_check_rank))
    address = talk.ask(Step("main_process_ip", check=_check_address))
    if address == "localhost" or address.startswith("127."):
        talk.asker.say(f"  Note: {address} is this machine alone; the other machines cannot reach it under that name.")
    talk.ask(Step("main_process_port", _STATIC_PORT, check=_check_port))
    talk.ask(Step("same_network", True))
    talk.ask("rdzv_backend")


def _ask_engine(talk: Interview, kind: Kind, was: str | None) -> str:
    if len(kind.engines) == 1:
        return kind.engines[0]
    titles = [_ENGINES[engine][0] for engine in kind.engines]
    default = next((at for at, engine in enumerate(kind.engines) if _ENGINES[engine][1] == was and was), 0)
    return kind.engines[talk.asker.choose("How should the processes share the model?", titles, default)]


def _ask_compilation(talk: Interview) -> None:
    before = talk.previous.get("dynamo_backend") not in (None, "no")
    if not talk.yes("Should the model be compiled with torch.compile?", before):
        return
    backends = [word.lower() for word in DYNAMO_BACKENDS if word != "TORHCHXLA_TRACE_ONCE"]
    talk.ask(Step("dynamo_backend", "inductor", choices=tuple(backends)))
    if talk.yes("Should its settings be changed?"):
        talk.all(steps.DYNAMO_MORE)


def _ask_engine_settings(talk: Interview, engine: str) -> None:
    if engine == _DEEPSPEED:
        if talk.yes("Do you have a configuration file of DeepSpeed?", was="deepspeed_config_file"):
            talk.all(steps.DEEPSPEED_FILE)
        else:
            talk.all(steps.DEEPSPEED)
        talk.all(steps.DEEPSPEED_MACHINES)
    elif engine == _FSDP:
        talk.all(steps.FSDP)
    elif engine == _MEGATRON:
        talk.all(steps.MEGATRON)
        if talk.yes("Should further settings of Megatron-LM be made?"):
            talk.all(steps.MEGATRON_MORE)
    further = {
        _DEEPSPEED: steps.PARALLELISM_DEEPSPEED,
        _FSDP: steps.PARALLELISM_FSDP if talk.values.get("fsdp_version") == "2" else (),
    }.get(engine)
    question = "Should several kinds of parallelism be combined (ParallelismConfig)?"
    if further and talk.yes(question, was="use_parallelism_config"):
        talk.all(further)


def _ask_mpi(talk: Interview) -> None:
    if talk.yes("Should mpirun start the processes?", was="mpirun_hostfile"):
        talk.ask(Step("mpirun_hostfile", check=steps.is_file))
        talk.ask(Step("mpirun_ccl", "1", check=_check_workers))


def _ask_tpu(talk: Interview) -> None:
    talk.ask(Step("main_training_function", "main", check=_check_name))
    if talk.ask("tpu_use_cluster"):
        talk.all(steps.TPU_POD)


def _ask_processes(talk: Interview, kind: Kind) -> None:
    machines = talk.values["num_machines"]
    product = math.prod(
        value for name, value in talk.values.items() if name.startswith("parallelism_config") and "size" in name
    )
    here = talk.machine.count if kind.device == talk.machine.device else 0
    offered = max(here, {"MULTI_CPU": 2, "XLA": 8}.get(kind.word, 1)) * machines
    share = math.lcm(machines, product)
    offered = share * -(-offered // share)
    while True:
        count = talk.ask(Step("num_processes", offered, check=_check_share(machines, product)))
        if not (here and machines == 1 and count > here and not talk.machine.shareable):
            break
        talk.asker.say(
            f"  This machine has {here} {kind.unit}{'' if here == 1 else 's'}, and each process needs one of its own: "
            f"`accelerate launch` will refuse {count} processes here."
        )
        # Sizes of the parallelism that ask for more were answered before: only another machine can have them.
        if here % share or talk.yes("Is the file for another machine?"):
            break
        talk.previous = {**talk.previous, "num_processes": here}
    if kind.device == "cuda":
        if machines == 1:
            talk.ask(Step("gpu_ids", "all", check=_check_ids))
        if talk.ask("enable_cpu_affinity"):
            # What is meant without the key, which other readers of such files do not know.
            if talk.ask(Step("numa_affinity", "node", choices=("node", "socket", "exclusive"))) == "node":
                del talk.values["numa_affinity"]
            else:
                talk.asker.say(
                    "  Note: other packages that read such files know no numa_affinity, and refuse the file."
                )


def _ask_precision(talk: Interview, tpu: bool) -> None:
    choices = ("no", "bf16") if tpu else ("no", "fp16", "bf16", "fp8")
    precision = talk.ask(Step("mixed_precision", "no", choices=choices))
    if precision == "fp8":
        if talk.machine.device != "cuda":
            talk.asker.say(
                "  Note: FP8 needs a GPU of NVIDIA's Hopper generation or later, which this machine does not show."
            )
        talk.all(steps.FP8)
    if precision == "fp16" and talk.values["cpu"]:
        talk.asker.say(
            "  Note: CPUs compute fp16 slowly, and not every operation has it; bf16 is the better choice there."
        )
    if tpu and precision == "bf16":
        talk.ask("downcast_bf16")


def _check_workers(value: str, values: Mapping[str, Any]) -> None:
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"The answer is {value!r}; it must be a whole number.")


def _check_rank(value: int, values: Mapping[str, Any]) -> None:
    if not 0 <= value < values["num_machines"]:
        count = values["num_machines"]
        raise ValueError(f"The answer is {value}; {count} machines have the numbers from 0 to {count - 1}.")


def _check_address(value: str, values: Mapping[str, Any]) -> None:
    if not re.fullmatch(r"[\w.:%\[\]-]+", value):
        raise ValueError(f"The answer is {value!r}; write a name or an address alone, such as 10.0.0.1.")
    if re.fullmatch(r"[^:]+:\d+", value):
        raise ValueError(f"The answer is {value!r}; the port is the next question.")


def _check_port(value: int, values: Mapping[str, Any]) -> None:
    if not 1 <= value <= 65535:
        raise ValueError(f"The answer is {value}; ports of several machines are numbers from 1 to 65535.")


def _check_name(value: str, values: Mapping[str, Any]) -> None:
    if not value.isidentifier():
        raise ValueError(f"The answer is {value!r}; that is no name of a function.")


def _check_ids(value: str, values: Mapping[str, Any]) -> None:
    ids = [part.strip() for part in value.split(",")]
    if value != "all" and not (all(part.isdecimal() for part in ids) and len(set(ids)) == len(ids)):
        raise ValueError(f"The answer is {value!r}; write different numbers separated by commas, such as 0,1, or all.")
    if value != "all" and len(ids) < values.get("num_processes", 1):
        raise ValueError(
            f"The answer names {len(ids)}, and {values['num_processes']} processes need one each. Name as many, or all."
        )


def _check_share(machines: int, product: int) -> Any:
    def check(value: int, values: Mapping[str, Any]) -> None:
        at_least(1)(value, values)
        if value % machines:
            raise ValueError(f"{value} processes cannot be shared evenly by {machines} machines.")
        if value % product:
            raise ValueError(f"The sizes of the parallelism need {product} processes, or a multiple; {value} is none.")

    return check
