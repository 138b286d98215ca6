"""Options of special hardware, numerics and layouts: TPU, FP8, SageMaker, MPI, parallelism along several dimensions."""

from functools import partial

from accelerate.config.options.schema import BIT, NOT_GIVEN, SEVERAL, Option, at_least, existing_file, matching, rows

_tpu = rows("TPU", feature="tpu", chapter="tpu")
_pod = partial(_tpu, when={"tpu_use_cluster": (True,)})
_pod_key = partial(_pod, flags=())

TPU_OPTIONS: tuple[Option, ...] = (
    _tpu(
        "main_training_function",
        "The function of the script to run on each core.",
        offer="main",
        check=matching(r"[^\W\d]\w*", "that is no name of a function"),
    ),
    _tpu(
        "tpu_use_cluster",
        "Train on a TPU pod of Google Cloud.",
        flags=("--tpu_cluster",),
        default=False,
        switch=True,
        negation="--no_tpu_cluster",
    ),
    _tpu(
        "downcast_bf16",
        "With bf16, turn float64 tensors into float32 rather than bfloat16.",
        default=False,
        switch=True,
        chapter="precision",
        when={"kind": ("XLA",), "mixed_precision": ("bf16",)},
    ),
    _pod_key("tpu_name", "Name of the TPU."),
    _pod_key("tpu_zone", "Zone of the TPU."),
    _pod("tpu_use_sudo", "Run the script with sudo in the pod.", default=False, switch=True),
    _pod_key("command_file", "File of commands to run in the pod.", optional=True, check=existing_file),
    _tpu(
        "commands",
        "Commands to run in the pod.",
        type="strs",
        flags=(),
        when={"tpu_use_cluster": (True,), "command_file": NOT_GIVEN},
    ),
    _pod("vm", "A virtual machine of the pod; give it once for each.", type="strs", key="tpu_vm"),
    _pod("env", "A NAME=VALUE to set in the pod; give it once for each.", type="strs", key="tpu_env"),
)


_fp8 = rows(
    "FP8 Arguments", "fp8_", section="fp8_config", feature="fp8", chapter="fp8", env="ACCELERATE_FP8_*", key="*"
)
_te = partial(_fp8, when={"fp8_backend": ("te",)})

FP8_OPTIONS: tuple[Option, ...] = (
    _fp8("backend", "Library: torchao, Transformer Engine or MS-AMP.", choices=("ao", "te", "msamp")),
    _te("use_autocast_during_eval", "Evaluate in FP8 too (te).", default=False, switch=True),
    _te("margin", "Margin of the scaling factor, as a power of two (te).", default=0, check=at_least(0)),
    _te("interval", "Steps between two computations of the scaling factor (te).", default=1, check=at_least(1)),
    _te(
        "format", "Number format of FP8 (te).", choices=("HYBRID", "E4M3", "E5M2"), default="HYBRID", key="fp8_format"
    ),
    _te("amax_history_len", "How many past maxima the scaling looks at (te).", default=1024, check=at_least(1)),
    _te(
        "amax_compute_algo",
        "Which of the past maxima counts (te).",
        choices=("max", "most_recent"),
        default="most_recent",
    ),
    _te(
        "override_linear_precision",
        "Use higher precision in the forward pass, the input gradient, the weight gradient (te).",
        type="bools",
        default=(False, False, False),
        env=None,
        env_names=("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD"),
    ),
    _fp8(
        "opt_level",
        "How much is kept in FP8 (msamp).",
        choices=("O1", "O2"),
        default="O2",
        when={"fp8_backend": ("msamp",)},
    ),
    _fp8(
        "enable_fsdp_float8_all_gather",
        "Let FSDP2 gather the weights in FP8 (ao).",
        default=True,
        style=BIT,
        when={"fp8_backend": ("ao",), "fsdp_version": ("2",)},
    ),
    _fp8(
        "pad_inner_dim",
        "Pad matrices to sizes FP8 can do (ao).",
        default=True,
        style=BIT,
        when={"fp8_backend": ("ao",)},
    ),
)

_aws = rows("AWS Arguments", key="", feature="sagemaker")
_mpi = rows("MPI Arguments", section="mpirun_config", chapter="mpi")

ENVIRONMENT_OPTIONS: tuple[Option, ...] = (
    _aws("aws_access_key_id", "Access key of the AWS account."),
    _aws("aws_secret_access_key", "Secret key of the AWS account."),
    _mpi("mpirun_hostfile", "Host file of mpirun, to start CPU processes through it.", check=existing_file),
    _mpi(
        "mpirun_ccl",
        "Workers of oneCCL for each process.",
        flags=(),
        feature="mpi",
        offer="1",
        check=matching(r"[0-9]+", "it must be a whole number"),
    ),
    Option(
        name="compute_environment",
        group="options",
        flags=(),
        choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
        help="LOCAL_MACHINE or AMAZON_SAGEMAKER.",
    ),
)

_FSDP = {"distributed_type": ("FSDP",)}
_SPLIT = {"parallelism_config_cp_size": SEVERAL}
_ULYSSES = {"parallelism_config_sp_size": SEVERAL}


_parallelism = rows(
    "ParallelismConfig Arguments",
    "parallelism_config_",
    section="parallelism_config",
    feature="parallelism",
    chapter="parallelism",
    env="PARALLELISM_CONFIG_*",
)
_ulysses = partial(_parallelism, above_one="parallelism_config_sp_size", when=_ULYSSES)
_parallel_size = partial(_parallelism, default=1, check=at_least(1))

PARALLELISM_OPTIONS: tuple[Option, ...] = (
    _parallel_size("dp_replicate_size", "Copies of the model (data parallel)."),
    _parallel_size("dp_shard_size", "Processes that one copy is sharded over (FSDP).", when=_FSDP),
    _parallel_size("tp_size", "Processes that one layer is split over (tensor parallel).", when=_FSDP),
    _parallel_size("cp_size", "Processes that one sequence is split over (context parallel).", when=_FSDP),
    _parallelism(
        "cp_backend", "Implementation of context parallelism.", choices=("torch",), default="torch", when=_SPLIT
    ),
    _parallelism(
        "cp_comm_strategy",
        "How the processes of one sequence exchange keys and values: allgather or alltoall.",
        default="allgather",
        above_one="parallelism_config_cp_size",
        words=("allgather", "alltoall"),
        when=_SPLIT,
    ),
    _parallel_size(
        "sp_size", "Processes of sequence parallelism (Ulysses).", when={"distributed_type": ("DEEPSPEED",)}
    ),
    _parallelism(
        "sp_backend",
        "Implementation of sequence parallelism; torch is this fork's own.",
        choices=("deepspeed", "torch"),
        default="deepspeed",
        when=_ULYSSES,
    ),
    _ulysses("sp_seq_length_is_variable", "The sequence length differs from batch to batch.", default=True),
    _ulysses(
        "sp_seq_length",
        "Length of every sequence (Ulysses).",
        when={**_ULYSSES, "parallelism_config_sp_seq_length_is_variable": (False,)},
        check=matching(r"0*[1-9][0-9]*", "it must be a whole number of at least 1"),
    ),
    _ulysses(
        "sp_attn_implementation",
        "Attention of sequence parallelism: eager, flash_attention_2, flash_attention_3 or sdpa.",
        default="sdpa",
        words=("sdpa", "flash_attention_2", "flash_attention_3"),
        open=True,
    ),
)
