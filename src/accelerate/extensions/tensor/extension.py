"""The actions of tensor and expert parallelism at `prepare`."""

from typing import Any

from accelerate.config.strategies import traits_of
from accelerate.extension import Extension
from accelerate.extensions.tensor import adopt, experts
from accelerate.modules.unwrap import model_has_dtensor


class TensorParallelism(Extension):
    """Shards the layers and the experts of models over ranks, and follows the layout of models that arrive sharded."""

    order = 10

    @property
    def serves(self) -> tuple[str, ...]:
        """The sizes of the mesh that are in use."""
        layout = self.run.parallelism_config
        return tuple(name for name in ("tp_size", "ep_size") if getattr(layout, name, 1) > 1)

    def arrives(self, models: list[Any], evaluation: bool) -> None:
        """Follow the layout of models that arrive sharded; refuse layers that no strategy trains."""
        sharded = [model for model in models if model_has_dtensor(model)]
        if sharded:
            adopt.adopt(self.run, sharded)
        if sharded or not evaluation:
            self._check_layout()

    def _check_layout(self) -> None:
        layout, run = self.run.parallelism_config, self.run
        if layout is None:
            return
        if self.serves and run.is_fsdp2 and run.state.fsdp_plugin.cpu_ram_efficient_loading:
            raise ValueError(
                f"cpu_ram_efficient_loading=True with tp_size={layout.tp_size} and ep_size={layout.ep_size}: layers are split before they are sharded, and each "
                "group of ranks needs their weights for that. Set cpu_ram_efficient_loading=False; for the launcher, whose default is true, "
                "`--fsdp_cpu_ram_efficient_loading false` or the same key in its file."
            )
        traits = traits_of(run.distributed_type)
        # An engine that places its models averages gradients itself.
        averages = traits.sharded or traits.custom_device_placement
        if averages or not layout.tp_enabled or len(layout.active_mesh_dims) == 1:
            return
        sizes = " and ".join(f"{axis}_size={getattr(layout, f'{axis}_size')}" for axis in layout.active_mesh_dims)
        raise ValueError(
            f"{sizes} without FSDP: nothing would average gradients over the ranks that tensor parallelism leaves. Pass "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or make tp_size the number of processes."
        )

    def convert(self, model: Any, evaluation: bool) -> Any:
        """Shard the layers and the experts of a model that trains."""
        layout = self.run.parallelism_config
        if evaluation or layout is None or traits_of(self.run.distributed_type).own_groups:
            return model
        if layout.tp_enabled:
            (model,) = self.run._prepare_tp(model)
        if layout.ep_size > 1:
            (model,) = experts.prepare(self.run, (model,))
        return model
