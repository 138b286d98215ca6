"""Which ranks do what: the sizes of the parallel dimensions, and the device mesh that they span."""

import math
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

from accelerate.base import _lazy
from accelerate.config import env
from accelerate.extension import imported, specs
from accelerate.runtime import torch_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__getattr__ = _lazy.aliases(__name__)


# Outermost first: stages exchange least. Neighbours in the last dimension are on one node, where the frequent messages of tensor parallelism
# belong; https://arxiv.org/abs/2104.04473, section 3.
_MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
# The class of the settings of each dimension, which are those of extensions.
_HANDLERS = {axis: address for spec in specs() for axis, address in spec.dimensions.items()}


def _enabled(axis: str, doc: str) -> Any:
    """Return the property that says whether a dimension has several ranks."""
    return property(lambda self: getattr(self, f"{axis}_size") > 1, doc=doc)


@dataclass
class ParallelismConfig:
    """The sizes of every parallel dimension; their product is the number of processes.

    A size that is None comes from the environment (PARALLELISM_CONFIG_DP_REPLICATE_SIZE and so on, which
    `accelerate launch` sets), and is 1 otherwise.

    Args:
        dp_replicate_size: copies of the model.
        dp_shard_size: ranks that FSDP shards one copy over.
        tp_size: ranks that share each layer (tensor parallelism).
        cp_size: ranks that share each sequence inside attention (context parallelism, with FSDP version 2).
        cp_backend: who does it; "torch".
        sp_size: ranks that share each sequence outside attention (sequence parallelism, excludes `cp_size`).
        sp_backend: who does it; "deepspeed" (the default), or "torch", which is this fork's and works with every strategy
            that a mesh can be laid over.
        tp_handler: further settings of tensor parallelism.
        cp_handler: further settings of context parallelism.
        sp_handler: further settings of sequence parallelism.
        ep_size: ranks that share the experts of each layer (expert parallelism, this fork's); they are taken from those of `dp_shard_size`
            and `tp_size`, so it does not multiply the number of processes.
        pp_size: ranks that the layers of one copy are divided over (pipeline parallelism, this fork's; `Accelerator.prepare_pipeline`).

    Raises:
        ValueError: a size below 1, an unknown backend, a handler of the wrong class, or dimensions that do not combine.

    Example:
        >>> config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
        >>> config.total_size, config.fsdp_dim_names
        (8, ['dp_replicate', 'dp_shard_cp'])
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] | None = None
    sp_size: int | None = None
    sp_backend: Literal["deepspeed", "torch"] | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    ep_size: int = 1
    pp_size: int | None = None

    device_mesh = None  # the mesh once it is built; not a field, so that equality and copies stay cheap
    expert_mesh = None  # the ranks that shard the same experts, once those are split

    def __post_init__(self) -> None:
        for axis in _AXES:
            name = f"{axis}_size"
            size = env.setting(getattr(self, name), f"parallelism_config_{name}", 1, name)
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1.")
            setattr(self, name, size)
        self._sizes = {axis: getattr(self, f"{axis}_size") for axis in _AXES}
        for name, supported in (("cp_backend", ("torch",)), ("sp_backend", ("deepspeed", "torch"))):
            value = env.setting(getattr(self, name), f"parallelism_config_{name}", supported[0])
            if value not in supported:
                raise ValueError(f"{name} is {value!r}; choose {' or '.join(map(repr, supported))}.")
            setattr(self, name, value)
        if self.cp_size > 1 and self.sp_size > 1:
            raise ValueError(
                f"cp_size is {self.cp_size} and sp_size is {self.sp_size}, but both split the sequence. Set one of them to 1."
            )
        if self.dp_replicate_size > 1 and self.dp_shard_size == 1 and (self.tp_size > 1 or self.cp_size > 1):
            raise ValueError(
                f"dp_replicate_size={self.dp_replicate_size} with tp_size={self.tp_size} and cp_size={self.cp_size} would "
                "replicate without sharding, which cannot be combined with tensor or context parallelism. Set dp_shard_size "
                "above 1, or dp_replicate_size to 1."
            )
        inside = {axis: getattr(self, f"{axis}_size") for axis in ("tp", "cp", "sp", "ep")}
        if self.pp_size > 1 and (others := {axis: size for axis, size in inside.items() if size > 1}):
            axis, size = next(iter(others.items()))
            raise ValueError(
                f"pp_size={self.pp_size} with {axis}_size={size}: a pipeline combines only with data parallelism. Set {axis}_size=1, and use "
                "dp_replicate_size, or dp_shard_size with FSDP."
            )
        if (
            self.ep_size < 1
            or self.ep_size > 1
            and (self.dp_shard_size * self.tp_size % self.ep_size or self.ep_size % self.tp_size)
        ):
            raise ValueError(
                f"ep_size is {self.ep_size}, with dp_shard_size={self.dp_shard_size} and tp_size={self.tp_size}. It must divide their product "
                "and be a multiple of tp_size: experts are spread over the ranks that share one copy of the model."
            )
        for axis, address in _HANDLERS.items():
            name, size = f"{axis}_handler", self._sizes[axis]
            handler = getattr(self, name)
            if handler is None and size > 1:
                setattr(self, name, imported(address)())
            elif handler is not None and not isinstance(handler, kind := imported(address)):
                raise ValueError(f"{name} is a {type(handler).__name__}; it must be a {kind.__name__}.")

    def __getstate__(self) -> dict[str, Any]:
        # A mesh holds process groups, which mean nothing in another process.
        return {name: value for name, value in self.__dict__.items() if not name.endswith("_mesh")}

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a dictionary of JSON values, without the device mesh.

        Not a collective.

        Example:
            >>> ParallelismConfig(dp_shard_size=2).to_json()["dp_shard_size"]
            2
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shown = {name: asdict(value) if is_dataclass(value) else value for name, value in fields.items()}
        plan = getattr(self.tp_handler, "plan", None)
        if plan:  # torch's own styles are objects
            shown["tp_handler"]["plan"] = {
                pattern: style if isinstance(style, str) else repr(style) for pattern, style in plan.items()
            }
        return shown

    # -- dimensions ----------------------------------------------------------------------------------------------

    def _active(self, axes: tuple[str, ...]) -> list[str]:
        return [axis for axis in axes if self._sizes[axis] > 1]

    @property
    def _split_sequence(self) -> tuple[str, ...]:
        """The dimensions whose ranks have parts of one sequence, and whose gradients are averaged like those of batches."""
        return ("cp", "sp") if self.sp_backend == "torch" else ("cp",)

    @property
    def dp_dim_names(self) -> list[str]:
        """The active data-parallel dimensions; ranks that differ in them read different batches."""
        return self._active(("dp_replicate", "dp_shard"))

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active dimensions whose ranks work on the same batch."""
        return self._active(("tp", "cp", "sp", "pp"))

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The active dimensions that parameters are sharded over."""
        return self._active(("dp_shard", *self._split_sequence))

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The active dimensions that a loss is averaged over."""
        return self._active(("dp_replicate", "dp_shard", *self._split_sequence))

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh dimensions that `fully_shard` receives: replicas, if any, and the flattened shards."""
        return [*self._active(("dp_replicate",)), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions larger than 1, data parallelism first."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def total_size(self) -> int:
        """How many processes the configuration is for."""
        return math.prod(self._sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """How many different batches are worked on at a time."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes share one batch."""
        return self.tp_size * self.cp_size * self.sp_size * self.pp_size

    dp_replicate_enabled = _enabled("dp_replicate", "Whether there are several copies of the model.")
    dp_shard_enabled = _enabled("dp_shard", "Whether a copy is sharded over data-parallel ranks.")
    tp_enabled = _enabled("tp", "Whether layers are split.")
    cp_enabled = _enabled("cp", "Whether sequences are split inside attention.")
    sp_enabled = _enabled("sp", "Whether sequences are split outside attention.")
    pp_enabled = _enabled("pp", "Whether layers are divided into the stages of a pipeline.")

    @property
    def _sp_by_deepspeed(self) -> bool:
        """Whether DeepSpeed splits sequences, in separate groups: there is no mesh, and each rank reads its own batches."""
        return self.sp_enabled and self.sp_backend == "deepspeed"

    # -- mesh ----------------------------------------------------------------------------------------------------

    def build_device_mesh(self, device_type: str) -> "DeviceMesh | None":
        """Build the mesh of the active dimensions, with the flattened dimensions `dp`, `dp_shard_cp` and `dp_cp`.

        torch.distributed is started from the environment if it is not running.

        Collective: call on every rank.

        Args:
            device_type: such as "cuda" or "cpu".

        Returns:
            The mesh, or None when no dimension is active, or when DeepSpeed's sequence parallelism keeps separate groups.
            It is not cached; `get_device_mesh` does that.

        Example:
            >>> ParallelismConfig().build_device_mesh("cpu") is None
            True
        """
        from torch.distributed.device_mesh import init_device_mesh

        layout = self._get_mesh()
        if not layout or self._sp_by_deepspeed:
            return None
        names, shape = layout
        mesh = init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))
        several = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        torch_private.flatten(mesh, several)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> "DeviceMesh | None":
        """Return the device mesh, building it at the first call. The first call is made by every rank.

        Collective: call on every rank.

        Args:
            device_type: such as "cuda"; needed at the first call only.

        Raises:
            ValueError: there is no mesh yet and no `device_type`, or the mesh is for another device.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("There is no device mesh yet; pass device_type, for example 'cuda', to build it.")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(
                f"device_type is {device_type!r}, but the device mesh was built for {self.device_mesh.device_type!r}. Build a "
                "new ParallelismConfig for another device."
            )
        return self.device_mesh

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        """Return the names and sizes of the active dimensions, outermost first; nothing if there are none."""
        active = set(self.active_mesh_dims)
        # A dimension that a subclass adds goes innermost.
        names = [axis for axis in _MESH_ORDER if axis in active]
        names += [axis for axis in self._sizes if axis in active and axis not in names]
        return (tuple(names), tuple(self._sizes[axis] for axis in names)) if names else ()

    def _set_size(self, parallelism: str, size: int) -> None:
        """Change the size of one dimension, such as "dp_replicate"."""
        if parallelism not in self._sizes:
            raise AssertionError(f"parallelism is {parallelism!r}; choose one of {', '.join(self._sizes)}.")
        self._sizes[parallelism] = size
        setattr(self, f"{parallelism}_size", size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Check the sizes against the processes that run, and let unclaimed processes be replicas.

        Raises:
            ValueError: the product of the sizes is not the number of processes, or the strategy has no use for a mesh.
        """
        processes = accelerator.num_processes
        several = accelerator.multi_device or getattr(accelerator, "use_distributed", False)
        if self.total_size == 1 and processes > 1 and several and not accelerator.is_fsdp2:
            sharded = getattr(accelerator, "distributed_type", None) == "FSDP"
            self._set_size("dp_shard" if sharded else "dp_replicate", processes)
        # DeepSpeed keeps separate groups: the ranks left over from sequence parallelism are its data parallelism.
        fits = processes % self.total_size == 0 if self._sp_by_deepspeed else processes == self.total_size
        if self.total_size > 1 and not fits:
            arithmetic = " x ".join(
                f"{axis}_size={size}" for axis, size in self._sizes.items() if axis != "pp" or size > 1
            )
            raise ValueError(
                f"The sizes of the ParallelismConfig multiply to {arithmetic} = {self.total_size}, but {processes} "
                f"process(es) are running. Change the sizes, or launch {self.total_size} processes."
            )
        if accelerator.is_fsdp2 and not self.dp_shard_cp_dim_names:
            raise ValueError(
                f"FSDP is enabled, but dp_shard_size and cp_size are both 1 in {self!r}, so there is nothing to shard over. Set "
                f"dp_shard_size (with {processes} process(es), {processes // self.non_data_parallel_size or 1} is the most "
                "that fits), or launch without FSDP."
            )
        if self.total_size > 1 and not (accelerator.is_fsdp2 or several):
            raise ValueError(
                f"A ParallelismConfig of {self.total_size} processes needs processes that cooperate. Start the script with "
                "`accelerate launch`."
            )
