"""Options of a run on TPUs."""

from functools import partial

from accelerate.config.options.schema import NOT_GIVEN, Chapter, Feature, existing_file, matching, rows

_tpu = rows("TPU", feature="tpu", before="deepspeed_config_file")
_tpu_switch = partial(_tpu, default=False, switch=True)
_POD = {"tpu_use_cluster": (True,)}
_pod = partial(_tpu, when=_POD)
_pod_key = partial(_pod, flags=())

OPTIONS = (
    rows("Hardware Selection Arguments")(
        "tpu", "Run on TPUs.", default=False, switch=True, key="", before="mixed_precision"
    ),
    _tpu(
        "main_training_function",
        "The function of the script to run on each core.",
        offer="main",
        check=matching(r"[^\W\d]\w*", "that is no name of a function"),
    ),
    _tpu_switch(
        "tpu_use_cluster", "Train on a TPU pod of Google Cloud.", flags=("--tpu_cluster",), negation="--no_tpu_cluster"
    ),
    _tpu_switch(
        "downcast_bf16",
        "With bf16, turn float64 tensors into float32 rather than bfloat16.",
        chapter="precision",
        when={"kind": ("XLA",), "mixed_precision": ("bf16",)},
    ),
    _pod_key("tpu_name", "Name of the TPU."),
    _pod_key("tpu_zone", "Zone of the TPU."),
    _tpu_switch("tpu_use_sudo", "Run the script with sudo in the pod.", when=_POD),
    _pod_key("command_file", "File of commands to run in the pod.", optional=True, check=existing_file),
    _pod_key("commands", "Commands to run in the pod.", type="strs", when={**_POD, "command_file": NOT_GIVEN}),
    _pod("vm", "A virtual machine of the pod; give it once for each.", type="strs", key="tpu_vm"),
    _pod("env", "A NAME=VALUE to set in the pod; give it once for each.", type="strs", key="tpu_env"),
)

FEATURES = {
    "tpu": Feature("Training on TPUs", "tpu", kinds=("XLA",), devices="TPUs", runners=("tpu_pod", "tpu")),
}
CHAPTERS = (Chapter("tpu", when={"kind": ("XLA",)}, before="processes"),)
