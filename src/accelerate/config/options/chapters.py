"""The chapters of the interview that `accelerate config` holds, in order."""

from dataclasses import dataclass, field

from accelerate.config.options.schema import Answers


@dataclass(frozen=True)
class Chapter:
    """Some questions of the interview.

    Attributes:
        name: what the options of the chapter call it.
        question: asked first; the answer no passes the chapter over. None if there is no such question. The answer stands
            among the answers under the name of the chapter.
        when: the answers without which the chapter is passed over.
        was: the default of `question` is yes if an earlier file sets this option.
    """

    name: str
    question: str | None = None
    when: Answers = field(default_factory=dict)
    was: str | None = None


# Besides options and chapters, `when` may ask for `kind` (a word of `distributed_type` without the engines), `distributed_type`
# and `picks_devices`, which the interview finds out itself.
CHAPTERS: tuple[Chapter, ...] = (
    Chapter("machines"),
    Chapter("engine"),
    Chapter("compilation", "Should the model be compiled with torch.compile?", was="dynamo_backend"),
    Chapter("compilation details", "Should its settings be changed?", when={"compilation": (True,)}),
    Chapter(
        "deepspeed file",
        "Do you have a configuration file of DeepSpeed?",
        when={"distributed_type": ("DEEPSPEED",)},
        was="deepspeed_config_file",
    ),
    Chapter("deepspeed", when={"distributed_type": ("DEEPSPEED",)}),
    Chapter("fsdp", when={"distributed_type": ("FSDP",)}),
    Chapter("megatron", when={"distributed_type": ("MEGATRON_LM",)}),
    Chapter(
        "megatron details",
        "Should further settings of Megatron-LM be made?",
        when={"distributed_type": ("MEGATRON_LM",)},
    ),
    Chapter(
        "parallelism",
        "Should several kinds of parallelism be combined (ParallelismConfig)?",
        when={"distributed_type": ("DEEPSPEED", "FSDP"), "fsdp_version": (None, "2")},
        was="use_parallelism_config",
    ),
    Chapter("mpi", "Should mpirun start the processes?", when={"kind": ("MULTI_CPU",)}, was="mpirun_hostfile"),
    Chapter("tpu", when={"kind": ("XLA",)}),
    Chapter("processes"),
    Chapter("precision"),
    Chapter("fp8", when={"mixed_precision": ("fp8",)}),
    Chapter("other"),
)
