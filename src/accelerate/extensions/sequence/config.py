"""How a sequence is cut across processes: the settings of context and sequence parallelism."""

from dataclasses import dataclass

from accelerate.config import env
from accelerate.config.enums import at_public_path
from accelerate.config.options.schema import one_of, to_int


@at_public_path
@dataclass
class TorchContextParallelConfig:
    """How context parallelism moves keys and values between processes.

    Args:
        cp_comm_strategy: "allgather" collects all of them at once, "alltoall" passes them around in a ring. None reads
            PARALLELISM_CONFIG_CP_COMM_STRATEGY, else takes "allgather".

    Raises:
        ValueError: `cp_comm_strategy` is unknown.

    Source: https://pytorch.org/tutorials/prototype/context_parallel.html
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        env.fill(self, {"cp_comm_strategy": ("parallelism_config_cp_comm_strategy", "allgather")})
        one_of("cp_comm_strategy", self.cp_comm_strategy, ("allgather", "alltoall"))


@at_public_path
@dataclass
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed's sequence parallelism (ALST) cuts a sequence.

    Each field left at None is read from the environment variable `PARALLELISM_CONFIG_` and its name.

    Args:
        sp_seq_length: the length of every sequence, in tokens; needed where it is the same for all.
        sp_seq_length_is_variable: whether sequences differ in length between batches; True by default.
        sp_attn_implementation: the attention to call: "flash_attention_2", "flash_attention_3", "sdpa", or a flash
            attention kernel of the Hugging Face hub. None leaves the choice to the model.

    Raises:
        ValueError: the attention cannot be cut, or the common length is missing.

    Source: Arctic Long Sequence Training (arXiv 2506.13996)
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        variable = "PARALLELISM_CONFIG_SP_SEQ_LENGTH"
        defaults = {"sp_seq_length_is_variable": True, "sp_attn_implementation": None}
        env.fill(self, {name: (f"parallelism_config_{name}", default) for name, default in defaults.items()})
        if not self.sp_seq_length_is_variable:
            env.fill(self, {"sp_seq_length": ("parallelism_config_sp_seq_length", None)})
            if self.sp_seq_length is None:
                raise ValueError(f"sp_seq_length_is_variable=False needs the length, sp_seq_length or {variable}.")
            self.sp_seq_length = to_int(self.sp_seq_length, variable)
        chosen, names = self.sp_attn_implementation, ("flash_attention_2", "flash_attention_3", "sdpa")
        if chosen is None or chosen in names or ("/" in chosen and "flash-attn" in chosen):
            return
        why = " It builds its mask from the full sequence." if chosen in ("eager", "flex_attention") else ""
        usable = f"{', '.join(names)} or a flash attention kernel of the hub, such as 'kernels-community/flash-attn2'"
        raise ValueError(f"Invalid sp_attn_implementation: {chosen!r}.{why} Use one of {usable}.")
