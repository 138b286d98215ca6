"""`parallelism_config`: sizes, dimensions, meshes, and what is refused."""

import copy
import pickle

from accelerate import ParallelismConfig
from accelerate.utils import dataclasses
from interop.differential.core import probe, properties, words
from interop.differential.probes.plugins import fields_of

COVERED = "parallelism_config:ParallelismConfig"
AXES = ["dp_replicate", "dp_shard", "tp", "cp", "sp"]
PROPERTIES = properties(COVERED)
MADE = {
    "none": lambda: None, "tensor": dataclasses.TorchTensorParallelConfig,
    "context": lambda: dataclasses.TorchContextParallelConfig("alltoall"),
    "sequence": lambda: dataclasses.DeepSpeedSequenceParallelConfig(sp_seq_length=8), "text": lambda: "nonsense",
}  # fmt: skip
HANDLERS = {
    **dict.fromkeys(["tp_handler", "cp_handler", "sp_handler"], MADE),
    "cp_backend": words("torch TORCH deepspeed nonsense", None, "", 1),
    "sp_backend": words("deepspeed DEEPSPEED nonsense", None, "", 1),
}


def looks(config):
    return {**fields_of(config), **{name: getattr(config, name) for name in PROPERTIES}, "mesh": config._get_mesh()}


@probe(COVERED, dp_replicate=[1, 2], dp_shard=[1, 2, 3], tp=[1, 2], cp=[1, 4], sp=[1, 2])
def sizes(**axes):
    config = ParallelismConfig(**{f"{axis}_size": size for axis, size in axes.items()})
    yield "looks", looks(config)
    yield "copies", [fields_of(copy.deepcopy(config)) == fields_of(config), config == copy.deepcopy(config)]
    yield "pickled", looks(pickle.loads(pickle.dumps(config)))
    yield (
        "text",
        [str(config) == repr(config), all(f"{axis}_size={size}" in repr(config) for axis, size in axes.items())],
    )


for axis_ in ("tp", "cp", "sp"):
    for name_, values_ in HANDLERS.items():

        def run(value, size, axis=axis_, name=name_):
            return fields_of(ParallelismConfig(**{f"{axis}_size": size, name: value}))

        run.__name__ = f"{axis_}_with_{name_}"
        probe(COVERED, value=values_, size=[1, 2])(run)


@probe(COVERED, axis=words("dp TP tp_size", *AXES, "", None), size=[1, 2, 0, -1, "2", None])
def changed_size(axis, size):
    config = ParallelismConfig(dp_shard_size=2)
    config._set_size(axis, size)
    return [looks(config), {name: size for name, size in config._sizes.items() if name != "pp"}]


MESHES = [{}, {"dp_replicate_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2}, {"cp_size": 2}, {"sp_size": 2}]


@probe(COVERED, processes=2, sizes=MESHES[1:4], device=["cuda", "meta"])
def other_device(sizes, device):
    config = ParallelismConfig(**sizes)
    config.get_device_mesh("cpu")
    return config.get_device_mesh(device) is None
