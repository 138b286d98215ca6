"""The interview about machines of your own."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.base import _lazy
from accelerate.base.constants import (  # noqa: F401, words that the recorded interface has here
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
    TORCH_DYNAMO_MODES,
)
from accelerate.config.options import CHAPTERS, OPTIONS, SWITCH_OF_DISTRIBUTED_TYPE, Option
from accelerate.extensions.configure.config_args import ClusterConfig
from accelerate.extensions.configure.config_utils import DYNAMO_BACKENDS  # noqa: F401
from accelerate.extensions.configure.interview import Asker, Interview, parallel_size
from accelerate.launch import hardware

__getattr__ = _lazy.aliases("accelerate.commands.config.cluster")


# How the processes share the model: the word of `distributed_type`, None for that of the kind, and the line of the menu.
_PLAIN = ((None, "Plain data parallelism: a full model in every process"),)
_SHARDED = (*_PLAIN, ("FSDP", "FSDP: the model is sharded over the processes"), ("DEEPSPEED", "DeepSpeed"))


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        word: the value of `distributed_type` in the file, unless an engine determines it.
        device: torch's name of the required devices; None for a run that any machine can do.
        unit: the name of one device.
        engines: the engines that run on it.
    """

    title: str
    word: str
    device: str | None = None
    unit: str = "process"
    engines: tuple[tuple[str | None, str], ...] = _SHARDED


KINDS: tuple[Kind, ...] = (
    Kind("No distributed training: one process", "NO", engines=_PLAIN),
    Kind("Several processes on CPUs", "MULTI_CPU"),
    Kind("XPUs of Intel", "MULTI_XPU", "xpu", "XPU"),
    Kind("Gaudi processors of Intel (HPU)", "MULTI_HPU", "hpu", "HPU"),
    Kind("GPUs of NVIDIA or AMD", "MULTI_GPU", "cuda", "GPU"),
    Kind("NPUs of Ascend", "MULTI_NPU", "npu", "NPU"),
    Kind("MLUs of Cambricon", "MULTI_MLU", "mlu", "MLU"),
    Kind("SDAA devices of Tecorigin", "MULTI_SDAA", "sdaa", "device"),
    Kind("MUSA GPUs of Moore Threads", "MULTI_MUSA", "musa", "GPU"),
    Kind("Trainium and Inferentia cores of AWS (Neuron)", "MULTI_NEURON", "neuron", "core"),
    Kind("TPUs of Google", "XLA", "xla", "core", _PLAIN),
)
_ALONE, _CPUS, _TPUS = KINDS[0], KINDS[1], KINDS[-1]


def get_cluster_input() -> ClusterConfig:
    """Ask for the settings of machines of your own.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return ask_cluster(Asker())


def ask_cluster(
    asker: Asker,
    previous: Mapping[str, Any] | None = None,
    was: str | None = None,
    options: Sequence[Option] = OPTIONS,
) -> ClusterConfig:
    """Ask for the settings of machines of your own; those of the file that is replaced are the defaults.

    `was` is its `distributed_type`. Raises EOFError and KeyboardInterrupt as `get_cluster_input`.
    """
    talk = Interview(asker, hardware.detect(os.environ), previous or {}, options)
    kind = _ask_kind(talk, was)
    talk.facts.update(kind=kind.word, distributed_type=kind.word)
    talk.values["compute_environment"] = "LOCAL_MACHINE"
    # If the kind leaves one choice, it is the answer.
    if kind is _ALONE:
        talk.values.update(num_machines=1, num_processes=1, debug=False)
    else:
        talk.values["cpu"] = kind is _CPUS
    if kind is _TPUS:
        talk.values["num_machines"] = 1
    for chapter in CHAPTERS:
        if chapter.name == "engine":
            talk.facts["distributed_type"] = _ask_engine(talk, kind, was)
        if chapter.name == "processes":
            _ask_processes(talk, kind)
        talk.hold(chapter)
    return ClusterConfig(**{"debug": False, "distributed_type": talk.facts["distributed_type"], **talk.content()})


def _ask_kind(talk: Interview, was: str | None) -> Kind:
    kinds_of_machine = [kind for kind in KINDS if talk.machine.count and kind.device == talk.machine.device]
    kinds = [kind for kind in KINDS if kind.word in SWITCH_OF_DISTRIBUTED_TYPE]
    default = next((kind for kind in kinds if kind.word == was), kinds_of_machine[0] if kinds_of_machine else _ALONE)
    kind = kinds[talk.asker.choose("On what should the training run?", [k.title for k in kinds], kinds.index(default))]
    if kind.device is not None and kind.device != talk.machine.device:
        note = f"  Note: this machine shows no {kind.unit} of that kind, so `accelerate launch` will refuse such a run here."
        talk.asker.say(f"{note} The file can be right for another machine.")
    return kind


def _ask_engine(talk: Interview, kind: Kind, was: str | None) -> str:
    if len(kind.engines) == 1:
        return kind.word
    words = [word for word, _ in kind.engines]
    at = words.index(was) if was in words else 0
    chosen = talk.asker.choose("How should the processes share the model?", [line for _, line in kind.engines], at)
    return words[chosen] or kind.word


def _ask_processes(talk: Interview, kind: Kind) -> None:
    """Ask how many processes are started, until this machine can run them or the file is for another one."""
    machines = talk.values["num_machines"]
    device_count = talk.machine.count if kind.device == talk.machine.device else 0
    if kind is _ALONE:
        talk.facts["picks_devices"] = talk.machine.count > 1 and not talk.values["cpu"]
        return
    talk.facts["picks_devices"] = kind.device == "cuda" and machines == 1
    offered = max(device_count, {"MULTI_CPU": 2, "XLA": 8}.get(kind.word, 1)) * machines
    share = math.lcm(machines, parallel_size(talk.values))
    offered = share * -(-offered // share)
    while True:
        count = talk.ask("num_processes", offered)
        if not (device_count and machines == 1 and count > device_count and not talk.machine.shareable):
            break
        has = f"This machine has {device_count} {kind.unit}{'' if device_count == 1 else 's'}, and each process needs its own"
        talk.asker.say(f"  {has}: `accelerate launch` will refuse {count} processes here.")
        # Sizes of the parallelism that ask for more were answered before: only another machine can have them.
        if device_count % share or talk.asker.yes("Is the file for another machine?"):
            break
        talk.previous = {**talk.previous, "num_processes": device_count}
