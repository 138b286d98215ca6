"""Options of every run: the script, the hardware, the precision, the compiler."""

from functools import partial

from accelerate.config.options.schema import ON, SEVERAL, UPPER, Option, at_least, matching, port, rows

RESOURCES = "Resource Selection Arguments"
PARADIGM = "Training Paradigm Arguments"
DISTRIBUTED = "Distributed GPUs"

DYNAMO_WORDS = (
    "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt "
    "aot_torchxla_trace_once torhchxla_trace_once tvm"
)
# The recorded interface misspells one word, and lacks three that `torch.compile` takes.
MORE_DYNAMO_WORDS = "torchxla_trace_once hpu_backend neuron"

_general = rows("options", key="")
_hardware = rows("Hardware Selection Arguments", default=False, switch=True)
_resource = rows(RESOURCES)
_dynamo = rows(RESOURCES, "dynamo_", section="dynamo_config", chapter="compilation details", env="ACCELERATE_DYNAMO_*")
_dynamo_switch = partial(_dynamo, default=False, switch=True)
paradigm = rows(PARADIGM, "use_", default=False, switch=True, key="", env="ACCELERATE_USE_*", style=ON)
_distributed = rows(DISTRIBUTED, chapter="machines", when={"num_machines": SEVERAL})
_machines = partial(_distributed, feature="machines")
_runner = rows(DISTRIBUTED, key="")

OPTIONS: tuple[Option, ...] = (
    _general("config_file", "Configuration file (YAML or JSON) to read instead of the default one."),
    _general(
        "quiet",
        "Print nothing but what the script prints: no information lines, no summary of a failure.",
        flags=("--quiet", "-q"),
        switch=True,
    ),
    _hardware(
        "cpu",
        "Run on the CPU even if there is a GPU. With --num_processes N: N processes that communicate over gloo.",
        key="use_cpu",
        env="ACCELERATE_USE_CPU",
        chapter="machines",
    ),
    _hardware("multi_gpu", "Start one process per GPU, and fail if there are not enough.", key=""),
    _resource(
        "mixed_precision",
        "Number format of the forward and backward pass; weights keep their dtype.",
        choices="no fp16 bf16 fp8",
        env="ACCELERATE_MIXED_PRECISION",
        chapter="precision",
        special_words=({"kind": ("XLA",)}, ("no", "bf16")),
    ),
    _resource(
        "num_processes",
        "How many processes to start, over all machines. By default one for each GPU, or one.",
        type="int",
        chapter="processes",
        unset=("-1",),
        check=at_least(1),
    ),
    _distributed(
        "gpu_ids",
        "Which GPUs of this machine to use: their numbers, separated by commas, or 'all'.",
        chapter="processes",
        when={"picks_devices": (True,)},
        offer="all",
        check=matching(r"all|\d+(\s*,\s*\d+)*", "write numbers separated by commas, such as 0,1, or all"),
    ),
    _resource("num_machines", "How many machines take part.", chapter="machines", offer=1, check=at_least(1)),
    _resource(
        "num_cpu_threads_per_process",
        "OpenMP threads of each process. By default several processes share the cores of the machine evenly.",
        type="int",
        key="",
        env="OMP_NUM_THREADS",
    ),
    _dynamo(
        "backend",
        "Compile the model with torch.compile and this backend.",
        choices=f"{DYNAMO_WORDS} {MORE_DYNAMO_WORDS}",
        corrections={"torhchxla_trace_once": "torchxla_trace_once"},
        style=UPPER,
        words=tuple(word for word in DYNAMO_WORDS.split() if word not in ("no", "torhchxla_trace_once")),
        chapter="compilation",
        offer="inductor",
    ),
    _dynamo("mode", "What torch.compile aims at.", choices="default reduce-overhead max-autotune", default="default"),
    _dynamo_switch("use_fullgraph", "Fail if the model does not compile into one graph."),
    _dynamo_switch("use_dynamic", "Compile for changing tensor shapes."),
    _dynamo_switch("use_regional_compilation", "Compile a repeated block once."),
    paradigm("fsdp", "Shard model and optimizer over the processes (FSDP).", env="ACCELERATE_USE_FSDP"),
    paradigm("parallelism_config", "Combine several kinds of parallelism, as the ParallelismConfig arguments say."),
    _machines("machine_rank", "The number of this machine, from 0.", offer=0),
    _machines(
        "main_process_ip",
        "Address of machine 0.",
        check=matching(r"(?![^:]+:\d+$)[\w.:%\[\]-]+", "write a name or an address without a port, such as 10.0.0.1"),
    ),
    _distributed(
        "main_process_port",
        "Port at which the processes meet. By default (or 0) a free one, so that two jobs never clash.",
        offer=29500,
        check=port,
    ),
    _machines("same_network", "All machines are in one local network.", default=False, switch=True, offer=True),
    _runner(
        "tee",
        "Copy the output of the processes into files too: 1 is stdout, 2 is stderr, 3 is both.",
        flags=("-t", "--tee"),
        default="0",
    ),
    _runner("log_dir", "Directory of those files.", env="ACCELERATE_LOG_DIR"),
    _runner("role", "Name of the group of processes in torch's logs.", default="default"),
    _distributed(
        "rdzv_backend",
        "How the processes find each other: static or c10d.",
        default="static",
        words="static c10d",
        allow_other=True,
    ),
    _runner("rdzv_conf", "Settings of that method: key=value,key=value.", default=""),
    _runner("max_restarts", "How often to restart all processes after a failure.", default=0, check=at_least(0)),
    _runner("monitor_interval", "How often to look whether the processes are alive, in seconds.", default=0.1),
    _general("module", "The script is the name of a module, as in python -m.", flags=("-m", "--module"), switch=True),
    _general("no_python", "Run the script itself instead of handing it to Python.", switch=True),
    _general(
        "debug",
        "Check before each collective that all ranks pass the same, and print torch's own report of a failure.",
        switch=True,
        key=None,
        env="ACCELERATE_DEBUG_MODE",
        style=ON,
    ),
)
