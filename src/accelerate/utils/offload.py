"""Weights kept in files. The public path of `accelerate.extensions.big_models.store`."""

from accelerate.base._lazy import front

_NAMES = (
    "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight offload_state_dict "
    "offload_weight save_offload_index"
)
__getattr__, __dir__, __all__ = front(__name__, {"accelerate.extensions.big_models.store": _NAMES}, [])
