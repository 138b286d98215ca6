"""Options of every run: what is launched, on what hardware, in which precision, compiled how."""

from functools import partial

from accelerate.config.options.schema import ON, ONE, SEVERAL, UPPER, Option, at_least, matching, port

GENERAL = "options"
HARDWARE = "Hardware Selection Arguments"
RESOURCES = "Resource Selection Arguments"
PARADIGM = "Training Paradigm Arguments"
DISTRIBUTED = "Distributed GPUs"

DYNAMO_WORDS = (
    "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt "
    "aot_torchxla_trace_once torhchxla_trace_once tvm"
)
# The recorded interface misspells one word, and lacks three that `torch.compile` takes.
MORE_DYNAMO_WORDS = ("torchxla_trace_once", "hpu_backend", "neuron")

_general = partial(Option, group=GENERAL, key="")
_hardware = partial(Option, group=HARDWARE, type="bool", default=False, switch=True)
_resource = partial(Option, group=RESOURCES)
_dynamo = partial(Option, group=RESOURCES, section="dynamo_config", chapter="compilation details")
_paradigm = partial(Option, group=PARADIGM, type="bool", default=False, switch=True, key="", style=ON)
_distributed = partial(Option, group=DISTRIBUTED, chapter="machines", when={"num_machines": SEVERAL})
_runner = partial(Option, group=DISTRIBUTED, key="")

OPTIONS: tuple[Option, ...] = (
    _general(name="config_file", help="Configuration file (YAML or JSON) to read instead of the default one."),
    _general(
        name="quiet",
        flags=("--quiet", "-q"),
        type="bool",
        switch=True,
        help="Print nothing but what the script prints: no information lines, no summary of a failure.",
    ),
    _hardware(
        name="cpu",
        key="use_cpu",
        env="ACCELERATE_USE_CPU",
        help="Run on the CPU even where there is a GPU. With --num_processes N: N processes that talk through gloo.",
        question="Do you want to run your training on CPU only?",
        chapter="machines",
    ),
    _hardware(name="multi_gpu", key="", help="Insist on one process per GPU, and fail where there are not enough."),
    _hardware(name="tpu", key="", help="Run on TPUs."),
    _resource(
        name="mixed_precision",
        choices=("no", "fp16", "bf16", "fp8"),
        env="ACCELERATE_MIXED_PRECISION",
        help="Number format of the forward and backward pass; the weights stay as they are.",
        question="Which precision should the model compute in?",
        chapter="precision",
        special_words=({"kind": ("XLA",)}, ("no", "bf16")),
    ),
    _resource(
        name="num_processes",
        type="int",
        help="How many processes to start, over all machines. By default one for each GPU, or one.",
        question="How many processes should be started in total?",
        chapter="processes",
        unset=("-1",),
        check=at_least(1),
    ),
    _resource(
        name="num_machines",
        type="int",
        help="How many machines take part.",
        question="How many machines take part?",
        chapter="machines",
        offer=1,
        check=at_least(1),
    ),
    _resource(
        name="num_cpu_threads_per_process",
        type="int",
        key="",
        env="OMP_NUM_THREADS",
        help="OpenMP threads of each process. By default several processes share the cores of the machine evenly.",
    ),
    _resource(
        name="enable_cpu_affinity",
        type="bool",
        default=False,
        switch=True,
        env="ACCELERATE_CPU_AFFINITY",
        style=ONE,
        help="Bind each process to the CPU cores next to its GPU (NVIDIA); on the CPU, to cores of its own.",
        question="Should each process be bound to the CPU cores next to its GPU?",
        chapter="processes",
        when={"kind": ("MULTI_GPU",)},
    ),
    _resource(
        name="numa_affinity",
        choices=("none", "node", "socket", "exclusive"),
        env="ACCELERATE_NUMA_AFFINITY",
        help=(
            "Bind each process to CPU cores (Linux): those of the memory node next to its GPU, or of its socket, or a part of "
            "the node's that no other process gets. On the CPU the processes are spread over the nodes."
        ),
        question="To which CPU cores should each process be bound?",
        words=("node", "socket", "exclusive"),
        chapter="processes",
        when={"enable_cpu_affinity": (True,)},
    ),
    _dynamo(
        name="dynamo_backend",
        choices=(*DYNAMO_WORDS.split(), *MORE_DYNAMO_WORDS),
        corrections={"torhchxla_trace_once": "torchxla_trace_once"},
        env="ACCELERATE_DYNAMO_BACKEND",
        style=UPPER,
        help="Compile the model with torch.compile and this backend.",
        question="Which torch.compile backend should the model be compiled with?",
        words=tuple(word for word in DYNAMO_WORDS.split() if word not in ("no", "torhchxla_trace_once")),
        chapter="compilation",
        offer="inductor",
    ),
    _dynamo(
        name="dynamo_mode",
        choices=("default", "reduce-overhead", "max-autotune"),
        default="default",
        env="ACCELERATE_DYNAMO_MODE",
        help="What torch.compile optimises for.",
        question="What should torch.compile optimise for?",
    ),
    _dynamo(
        name="dynamo_use_fullgraph",
        type="bool",
        default=False,
        switch=True,
        env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        help="Fail if the model does not compile into one graph.",
        question="Must the model compile into a single graph?",
    ),
    _dynamo(
        name="dynamo_use_dynamic",
        type="bool",
        default=False,
        switch=True,
        env="ACCELERATE_DYNAMO_USE_DYNAMIC",
        help="Compile for changing tensor shapes.",
        question="Will the shapes of the tensors change?",
    ),
    _dynamo(
        name="dynamo_use_regional_compilation",
        type="bool",
        default=False,
        switch=True,
        env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        help="Compile a repeated block once instead of the whole model, which is quicker.",
        question="Should repeated blocks be compiled once instead of the whole model?",
    ),
    _paradigm(name="use_deepspeed", env="ACCELERATE_USE_DEEPSPEED", help="Train with DeepSpeed."),
    _paradigm(name="use_fsdp", env="ACCELERATE_USE_FSDP", help="Shard model and optimizer over the processes (FSDP)."),
    _paradigm(
        name="use_parallelism_config",
        env="ACCELERATE_USE_PARALLELISM_CONFIG",
        help="Combine several kinds of parallelism, as the ParallelismConfig arguments say.",
    ),
    _paradigm(name="use_megatron_lm", env="ACCELERATE_USE_MEGATRON_LM", help="Train with Megatron-LM."),
    _distributed(
        name="gpu_ids",
        help="Which GPUs of this machine to use: their numbers, separated by commas, or 'all'.",
        question="Which GPUs (by number) should be used, or all?",
        after="num_processes",
        chapter="processes",
        when={"picks_devices": (True,)},
        offer="all",
        check=matching(r"all|\d+(\s*,\s*\d+)*", "write numbers separated by commas, such as 0,1, or all"),
    ),
    _distributed(
        name="same_network",
        type="bool",
        default=False,
        switch=True,
        feature="machines",
        help="All machines are in one local network.",
        question="Are all machines in one local network?",
        after="main_process_port",
        offer=True,
    ),
    _distributed(
        name="machine_rank",
        type="int",
        feature="machines",
        help="The number of this machine, from 0.",
        question="What is the number of this machine (from 0)?",
        offer=0,
    ),
    _distributed(
        name="main_process_ip",
        feature="machines",
        help="Address of machine 0.",
        question="What is the address of machine 0?",
        check=matching(r"(?![^:]+:\d+$)[\w.:%\[\]-]+", "write a name or an address without a port, such as 10.0.0.1"),
    ),
    _distributed(
        name="main_process_port",
        type="int",
        help="Port at which the processes meet. By default (or 0) a free one, so that two jobs never clash.",
        question="At which port of machine 0 should the processes meet?",
        offer=29500,
        check=port,
    ),
    _runner(
        name="tee",
        flags=("-t", "--tee"),
        default="0",
        help="Copy the output of the processes into files too: 1 is stdout, 2 is stderr, 3 is both.",
    ),
    _runner(name="log_dir", help="Directory of those files."),
    _runner(name="role", default="default", help="Name of the group of processes in torch's logs."),
    _distributed(
        name="rdzv_backend",
        default="static",
        help="How the processes find each other: static or c10d.",
        question="How should the processes find each other?",
        words=("static", "c10d"),
        open=True,
    ),
    _runner(name="rdzv_conf", default="", help="Settings of that method: key=value,key=value."),
    _runner(
        name="max_restarts",
        type="int",
        default=0,
        help="How often to restart all processes after a failure.",
        check=at_least(0),
    ),
    _runner(
        name="monitor_interval",
        type="float",
        default=0.1,
        help="How often to look whether the processes are alive, in seconds.",
    ),
    _general(
        name="module",
        flags=("-m", "--module"),
        type="bool",
        switch=True,
        help="The script is the name of a module, as in python -m.",
    ),
    _general(
        name="no_python",
        type="bool",
        switch=True,
        help="Run the script itself instead of handing it to Python.",
    ),
    Option(
        name="debug",
        group=GENERAL,
        type="bool",
        switch=True,
        env="ACCELERATE_DEBUG_MODE",
        style=ON,
        help="Check before each collective that all ranks agree on it, and print torch's own report of a failure.",
        question="Should distributed operations be checked while the script runs (slower)?",
    ),
    _general(
        name="dry_run",
        type="bool",
        default=False,
        switch=True,
        help="Print what would be started, and where each setting comes from, and start nothing.",
    ),
)
