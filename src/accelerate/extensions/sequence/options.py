"""Options of a run whose ranks share sequences."""

from functools import partial

from accelerate.config.options.engines import parallelism
from accelerate.config.options.schema import SEVERAL, matching

_SPLIT = {"parallelism_config_cp_size": SEVERAL}
_ULYSSES = {"parallelism_config_sp_size": SEVERAL}

_ulysses = partial(parallelism, exported_if_several="parallelism_config_sp_size", when=_ULYSSES)

OPTIONS = (
    parallelism(
        "cp_backend",
        "Library of context parallelism.",
        choices="torch",
        default="torch",
        when=_SPLIT,
        before="parallelism_config_sp_size",
    ),
    parallelism(
        "cp_comm_strategy",
        "How the processes of one sequence exchange keys and values.",
        default="allgather",
        exported_if_several="parallelism_config_cp_size",
        words="allgather alltoall",
        when=_SPLIT,
        before="parallelism_config_sp_size",
    ),
    parallelism(
        "sp_backend",
        "Implementation of sequence parallelism; torch exists in this fork only.",
        choices="deepspeed torch",
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
        words="sdpa flash_attention_2 flash_attention_3",
        allow_other=True,
    ),
)
