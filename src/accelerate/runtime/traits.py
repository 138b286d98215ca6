"""What each way of cooperating can do: one row per `DistributedType`.

This table and the backend registry are the only places that look at the type itself; everybody else asks an ability.
"""

from dataclasses import dataclass, replace
from functools import cache

from accelerate.config.enums import DistributedType


@dataclass(frozen=True)
class Traits:
    """The abilities of one way of cooperating; the defaults are those of data parallelism through torch.

    Args:
        custom_device_placement: the engine moves models to the device itself.
        many_models: more than one model may be prepared.
        model_with_optimizer: model and optimizer must be prepared in one call.
        scales_loss: the loss is divided by the accumulation steps before `backward`.
        native_autocast: mixed precision runs through `torch.autocast` around the forward pass.
        uses_scaler: fp16 needs a gradient scaler of ours.
        clips_by_value: gradients can be clipped element by element.
        joins_uneven_inputs: ranks may run out of batches at different steps.
        places_batches: prepared loaders move batches to the device.
        mesh_counts_replicas: the number of data-parallel replicas comes from the mesh, not from the world size.
        reduces_on_step: gradients are reduced in `optimizer.step`, not during `backward`.
        owns_optimizer_state: the engine writes and reads the optimizer's state.
        owns_schedulers: the engine writes and reads the schedulers.
        distributed: more than one process may cooperate.
        torch_distributed: the processes talk through `torch.distributed`.
        xla: tensors live on XLA devices.
        sharded: parameters are split over processes by torch's FSDP.
        deepspeed: DeepSpeed is the engine.
    """

    custom_device_placement: bool = False
    many_models: bool = True
    model_with_optimizer: bool = False
    scales_loss: bool = True
    native_autocast: bool = True
    uses_scaler: bool = True
    clips_by_value: bool = True
    joins_uneven_inputs: bool = False
    places_batches: bool = True
    mesh_counts_replicas: bool = True
    reduces_on_step: bool = False
    owns_optimizer_state: bool = False
    owns_schedulers: bool = False
    distributed: bool = True
    torch_distributed: bool = True
    xla: bool = False
    sharded: bool = False
    deepspeed: bool = False


_DATA_PARALLEL = Traits(joins_uneven_inputs=True)

_ROWS: dict[DistributedType, Traits] = {
    DistributedType.NO: Traits(distributed=False, torch_distributed=False),
    **dict.fromkeys(
        (
            DistributedType.MULTI_GPU,
            DistributedType.MULTI_NPU,
            DistributedType.MULTI_MLU,
            DistributedType.MULTI_SDAA,
            DistributedType.MULTI_MUSA,
            DistributedType.MULTI_XPU,
            DistributedType.MULTI_CPU,
            DistributedType.MULTI_NEURON,
        ),
        _DATA_PARALLEL,
    ),
    # Gaudi computes in bf16 and has no fp16 scaler.
    DistributedType.MULTI_HPU: replace(_DATA_PARALLEL, uses_scaler=False),
    DistributedType.FSDP: Traits(
        custom_device_placement=True, clips_by_value=False, owns_optimizer_state=True, sharded=True
    ),
    DistributedType.DEEPSPEED: Traits(
        custom_device_placement=True,
        model_with_optimizer=True,
        scales_loss=False,
        native_autocast=False,
        uses_scaler=False,
        clips_by_value=False,
        owns_optimizer_state=True,
        owns_schedulers=True,
        deepspeed=True,
    ),
    DistributedType.MEGATRON_LM: Traits(
        custom_device_placement=True,
        many_models=False,
        model_with_optimizer=True,
        scales_loss=False,
        native_autocast=False,
        uses_scaler=False,
        clips_by_value=False,
        places_batches=False,
        owns_optimizer_state=True,
        owns_schedulers=True,
    ),
    DistributedType.XLA: Traits(reduces_on_step=True, torch_distributed=False, xla=True),
}


@cache
def of(distributed_type: DistributedType | str) -> Traits:
    """Return the abilities of a way of cooperating.

    Args:
        distributed_type: a member, or its name as a plain string.

    Raises:
        ValueError: there is no such type; the message lists the known ones.

    Example:
        >>> of("MULTI_CPU").torch_distributed
        True
    """
    return _ROWS[DistributedType(distributed_type)]
