"""How a model or a sequence is cut across processes: the options of each kind of parallelism."""

from dataclasses import dataclass
from typing import Any

from accelerate.base._warn import warn_user
from accelerate.base.constants import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
from accelerate.base.imports import is_transformers_available
from accelerate.base.versions import compare_versions
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
class TorchTensorParallelConfig:
    """How tensor parallelism works in detail.

    Args:
        enable_async_tp: overlap communication and computation. Not supported yet; it warns and has no effect.
        plan: how to cut a model over the ranks: patterns of module names, where `*` stands for anything between two dots, to
            torch ParallelStyle objects or to words such as "colwise" and "rowwise". None takes the model's own plan, which
            transformers' models carry. It is used for every model that is prepared and not cut yet.

    Raises:
        ValueError: the installed transformers is too old to share a model with us, or `plan` is no such dictionary.

    Example:
        >>> TorchTensorParallelConfig(plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}).plan["layers.*.up"]
        'colwise'

    Source: https://pytorch.org/docs/stable/distributed.tensor.parallel.html
    """

    enable_async_tp: bool = False
    plan: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        patterns = list(self.plan) if isinstance(self.plan, dict) else []
        if self.plan is not None and not (patterns and all(isinstance(pattern, str) for pattern in patterns)):
            expected = "a dictionary of module name patterns to styles, such as {'layers.*.up': 'colwise'}"
            raise ValueError(f"plan is {self.plan!r}; give {expected}, or None for the model's own plan.")
        needed = BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        if is_transformers_available() and compare_versions("transformers", "<", needed):
            raise ValueError(
                f"Tensor parallelism needs transformers {needed} or later, an older one is installed. Update it with "
                "`pip install -U transformers`."
            )
        if self.enable_async_tp:
            warn_user("enable_async_tp has no effect: asynchronous tensor parallelism is not supported yet.")


@at_public_path
@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism by torch, as the launcher describes it; `ParallelismConfig(tp_size=...)` replaces it.

    Args:
        tp_size: how many processes share each layer.
        torch_device_mesh: the `DeviceMesh` of the processes to use; None builds one of all.

    Raises:
        ValueError: `tp_size` is below one.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        self.tp_size = to_int(self.tp_size, "tp_size")
        if self.tp_size < 1:
            raise ValueError(f"tp_size is {self.tp_size}; at least 1 process holds a layer.")


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
