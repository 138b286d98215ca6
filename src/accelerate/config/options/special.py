"""Options of special hardware, numerics and layouts: TPU, FP8, SageMaker, MPI, parallelism along several dimensions."""

from functools import partial

from accelerate.config.options.schema import BIT, NOT_GIVEN, PLAIN, SEVERAL, Option, at_least, existing_file, matching

TPU = "TPU"
_tpu = partial(Option, group=TPU, feature="tpu", chapter="tpu")
_pod = partial(_tpu, when={"tpu_use_cluster": (True,)})

TPU_OPTIONS: tuple[Option, ...] = (
    _tpu(
        name="tpu_use_cluster",
        flags=("--tpu_cluster",),
        type="bool",
        default=False,
        switch=True,
        negation="--no_tpu_cluster",
        help="Train on a TPU pod of Google Cloud.",
        question="Is the TPU a pod of several machines?",
        after="main_training_function",
    ),
    _pod(
        name="tpu_use_sudo",
        type="bool",
        default=False,
        switch=True,
        help="Run the script with sudo in the pod.",
        question="Should the script run with sudo in the pod?",
        after="tpu_zone",
    ),
    _pod(
        name="vm",
        type="strs",
        key="tpu_vm",
        help="A virtual machine of the pod; give it once for each.",
        question="Which virtual machine of the pod takes part?",
        after="commands",
    ),
    _pod(
        name="env",
        type="strs",
        key="tpu_env",
        help="A NAME=VALUE to set in the pod; give it once for each.",
        question="Which NAME=VALUE should be set in the pod?",
        after="vm",
    ),
    _tpu(
        name="main_training_function",
        help="The function of the script to run on each core.",
        question="Which function of the script runs on each core?",
        offer="main",
        check=matching(r"[^\W\d]\w*", "that is no name of a function"),
    ),
    _tpu(
        name="downcast_bf16",
        type="bool",
        default=False,
        switch=True,
        help="With bf16, turn float64 tensors into float32 rather than bfloat16.",
        question="Should float64 tensors become float32 rather than bfloat16?",
        chapter="precision",
        when={"kind": ("XLA",), "mixed_precision": ("bf16",)},
    ),
    _pod(
        name="tpu_name",
        flags=(),
        help="Name of the TPU.",
        question="What is the name of the TPU?",
    ),
    _pod(
        name="tpu_zone",
        flags=(),
        help="Zone of the TPU.",
        question="In which zone is the TPU?",
    ),
    _pod(
        name="command_file",
        flags=(),
        help="File of commands to run in the pod.",
        question="Which file holds the commands to run in the pod first?",
        optional=True,
        check=existing_file,
    ),
    _tpu(
        name="commands",
        type="strs",
        flags=(),
        help="Commands to run in the pod.",
        question="Which command should run in the pod first?",
        when={"tpu_use_cluster": (True,), "command_file": NOT_GIVEN},
    ),
)

FP8 = "FP8 Arguments"


def _fp8(name: str, style: str = PLAIN, **rest: object) -> Option:
    variable = {} if "env_names" in rest else {"env": f"ACCELERATE_{name.upper()}"}
    short = name.removeprefix("fp8_")
    key = {"key": name if short == "format" else short}
    return Option(
        name=name,
        group=FP8,
        section="fp8_config",
        feature="fp8",
        chapter="fp8",
        style=style,
        **variable,
        **key,
        **rest,
    )


_te = partial(_fp8, when={"fp8_backend": ("te",)})

FP8_OPTIONS: tuple[Option, ...] = (
    _fp8(
        "fp8_backend",
        choices=("ao", "te", "msamp"),
        help="Library: torchao, Transformer Engine or MS-AMP.",
        question="Which library should compute in FP8?",
    ),
    _te(
        "fp8_use_autocast_during_eval",
        type="bool",
        default=False,
        switch=True,
        help="Evaluate in FP8 too (te).",
        question="Should the evaluation run in FP8 too?",
    ),
    _te(
        "fp8_margin",
        type="int",
        default=0,
        help="Margin of the scaling factor, as a power of two (te).",
        question="What is the margin of the scaling factor (a power of two)?",
        check=at_least(0),
    ),
    _te(
        "fp8_interval",
        type="int",
        default=1,
        help="Steps between two computations of the scaling factor (te).",
        question="How many steps lie between two computations of the scaling factor?",
        check=at_least(1),
    ),
    _te(
        "fp8_format",
        choices=("HYBRID", "E4M3", "E5M2"),
        default="HYBRID",
        help="Number format (te).",
        question="Which number format should be used?",
    ),
    _te(
        "fp8_amax_history_len",
        type="int",
        default=1024,
        help="How many past maxima the scaling looks at (te).",
        question="How many past maxima should the scaling look at?",
        check=at_least(1),
    ),
    _te(
        "fp8_amax_compute_algo",
        choices=("max", "most_recent"),
        default="most_recent",
        help="Which of them it uses (te).",
        question="Which of these maxima counts?",
    ),
    _te(
        "fp8_override_linear_precision",
        type="bools",
        default=(False, False, False),
        env_names=("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD"),
        help="Use higher precision in the forward pass, the input gradient, the weight gradient (te).",
        question="Where should higher precision be used (forward, input gradient, weight gradient: three truth values)?",
    ),
    _fp8(
        "fp8_opt_level",
        choices=("O1", "O2"),
        default="O2",
        help="How much is kept in FP8 (msamp).",
        question="How much should be kept in FP8?",
        when={"fp8_backend": ("msamp",)},
    ),
    _fp8(
        "fp8_enable_fsdp_float8_all_gather",
        type="bool",
        default=True,
        style=BIT,
        help="Let FSDP2 gather the weights in FP8 (ao).",
        question="Should FSDP gather the weights in FP8?",
        when={"fp8_backend": ("ao",), "fsdp_version": ("2",)},
    ),
    _fp8(
        "fp8_pad_inner_dim",
        type="bool",
        default=True,
        style=BIT,
        help="Pad matrices to sizes FP8 can do (ao).",
        question="Should matrices be padded to sizes that FP8 can do?",
        when={"fp8_backend": ("ao",)},
    ),
)

_aws = partial(Option, group="AWS Arguments", key="", feature="sagemaker")

ENVIRONMENT_OPTIONS: tuple[Option, ...] = (
    _aws(name="aws_access_key_id", help="Access key of the AWS account."),
    _aws(name="aws_secret_access_key", help="Secret key of the AWS account."),
    Option(
        name="mpirun_hostfile",
        group="MPI Arguments",
        section="mpirun_config",
        help="Host file of mpirun, to start CPU processes through it.",
        question="Which host file should mpirun read?",
        chapter="mpi",
        check=existing_file,
    ),
    Option(
        name="mpirun_ccl",
        group="MPI Arguments",
        section="mpirun_config",
        flags=(),
        feature="mpi",
        help="Workers of oneCCL.",
        question="How many workers of oneCCL should each process have?",
        chapter="mpi",
        offer="1",
        check=matching(r"[0-9]+", "it must be a whole number"),
    ),
    Option(
        name="compute_environment",
        group="options",
        flags=(),
        choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
        help="LOCAL_MACHINE or AMAZON_SAGEMAKER.",
        question="Where will the training run?",
    ),
)

PARALLELISM = "ParallelismConfig Arguments"
_FSDP = {"distributed_type": ("FSDP",)}
_SPLIT = {"parallelism_config_cp_size": SEVERAL}
_ULYSSES = {"parallelism_config_sp_size": SEVERAL}


def _parallelism(name: str, **rest: object) -> Option:
    name = f"parallelism_config_{name}"
    return Option(
        name=name,
        group=PARALLELISM,
        section="parallelism_config",
        feature="parallelism",
        chapter="parallelism",
        env=name.upper(),
        **rest,
    )


_parallel_size = partial(_parallelism, type="int", default=1, check=at_least(1))

PARALLELISM_OPTIONS: tuple[Option, ...] = (
    _parallel_size(
        "dp_replicate_size",
        help="Copies of the model (data parallel).",
        question="How many copies of the model should there be (data parallel)?",
    ),
    _parallel_size(
        "dp_shard_size",
        help="Processes that one copy is sharded over (FSDP).",
        question="Over how many processes is one copy sharded (FSDP)?",
        when=_FSDP,
    ),
    _parallel_size(
        "tp_size",
        help="Processes that one layer is split over (tensor parallel).",
        question="Over how many processes is one layer split (tensor parallel)?",
        when=_FSDP,
    ),
    _parallel_size(
        "cp_size",
        help="Processes that one sequence is split over (context parallel).",
        question="Over how many processes is one sequence split (context parallel)?",
        when=_FSDP,
    ),
    _parallelism(
        "cp_backend",
        choices=("torch",),
        default="torch",
        help="Implementation of context parallelism.",
        question="Which implementation of context parallelism should be used?",
        when=_SPLIT,
    ),
    _parallelism(
        "cp_comm_strategy",
        default="allgather",
        above_one="parallelism_config_cp_size",
        help="How its processes exchange keys and values: allgather or alltoall.",
        question="How should its processes exchange keys and values?",
        words=("allgather", "alltoall"),
        when=_SPLIT,
    ),
    _parallel_size(
        "sp_size",
        help="Processes of sequence parallelism (Ulysses).",
        question="Over how many processes is one sequence split (Ulysses sequence parallelism)?",
        when={"distributed_type": ("DEEPSPEED",)},
    ),
    _parallelism(
        "sp_backend",
        choices=("deepspeed", "torch"),
        default="deepspeed",
        help="Implementation of sequence parallelism; torch is this fork's own.",
        question="Which implementation of sequence parallelism should be used?",
        when=_ULYSSES,
    ),
    _parallelism(
        "sp_seq_length",
        above_one="parallelism_config_sp_size",
        help="Its sequence length.",
        question="How long are the sequences?",
        after="parallelism_config_sp_seq_length_is_variable",
        when={**_ULYSSES, "parallelism_config_sp_seq_length_is_variable": (False,)},
        check=matching(r"0*[1-9][0-9]*", "it must be a whole number of at least 1"),
    ),
    _parallelism(
        "sp_seq_length_is_variable",
        type="bool",
        default=True,
        above_one="parallelism_config_sp_size",
        help="The sequence length differs from batch to batch.",
        question="Does the length of the sequences differ from batch to batch?",
        when=_ULYSSES,
    ),
    _parallelism(
        "sp_attn_implementation",
        default="sdpa",
        above_one="parallelism_config_sp_size",
        help="Its attention: eager, flash_attention_2, flash_attention_3 or sdpa.",
        question="Which attention should sequence parallelism use?",
        words=("sdpa", "flash_attention_2", "flash_attention_3"),
        open=True,
        when=_ULYSSES,
    ),
)
