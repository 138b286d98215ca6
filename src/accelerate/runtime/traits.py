"""What each way of cooperating can do: one row per `DistributedType`.

This table and the backend registry are the only places that look at the type itself; all other code asks an ability.
"""

from dataclasses import dataclass, replace
from functools import cache

from accelerate.config.enums import DistributedType


@dataclass(frozen=True)
class Traits:
    """The abilities of one way of cooperating; the defaults are those of data parallelism through torch.

    Args:
        custom_device_placement: the engine moves models to the device itself.
        scales_loss: the loss is divided by the accumulation steps before `backward`.
        clips_by_value: gradients can be clipped element by element.
        joins_uneven_inputs: ranks may run out of batches at different steps.
        places_batches: prepared loaders move batches to the device.
        reduces_on_step: gradients are reduced in `optimizer.step`, not during `backward`.
        distributed: more than one process may cooperate.
    """

    custom_device_placement: bool = False
    scales_loss: bool = True
    clips_by_value: bool = True
    joins_uneven_inputs: bool = False
    places_batches: bool = True
    reduces_on_step: bool = False
    distributed: bool = True
    torch_distributed: bool = True
    xla: bool = False
    sharded: bool = False
    deepspeed: bool = False
    megatron: bool = False


_ENGINE = Traits(custom_device_placement=True, scales_loss=False, clips_by_value=False)
_ROWS: dict[DistributedType, Traits] = {
    # Devices on which replicas cooperate, one process each.
    **{kind: Traits(joins_uneven_inputs=True) for kind in DistributedType if kind.value.startswith("MULTI_")},
    DistributedType.NO: Traits(distributed=False, torch_distributed=False),
    DistributedType.FSDP: Traits(custom_device_placement=True, clips_by_value=False, sharded=True),
    DistributedType.DEEPSPEED: replace(_ENGINE, deepspeed=True),
    DistributedType.MEGATRON_LM: replace(_ENGINE, places_batches=False, megatron=True),
    DistributedType.XLA: Traits(reduces_on_step=True, torch_distributed=False, xla=True),
}


@cache
def of(distributed_type: DistributedType | str) -> Traits:
    """Return the abilities of a way of cooperating, a member or its name; ValueError lists the known ones."""
    return _ROWS[DistributedType(distributed_type)]
