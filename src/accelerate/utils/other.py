"""Helpers around training: the public path of functions in several rooms, and the home of small ones."""

from accelerate.base._lazy import front
from accelerate.base.text import convert_bytes as convert_bytes
from accelerate.base.text import get_pretty_name as get_pretty_name
from accelerate.checkpoint.torch_files import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from accelerate.checkpoint.torch_files import load as load
from accelerate.checkpoint.torch_files import load_each as load_each
from accelerate.checkpoint.torch_files import save as save
from accelerate.process import PartialState

# Names of other modules that this module also gives.
_HOMES = {
    "accelerate.extensions.compat.other": "check_os_kernel get_free_port get_model_tp_size is_port_in_use logger merge_dicts recursive_getattr",
    "accelerate.extensions.regional_compilation.regions": (
        "compile_regions compile_regions_deepspeed compile_regions_fsdp2 has_compiled_regions has_repeated_blocks is_repeated_blocks"
    ),
    "accelerate.modules.unwrap": (
        "clean_state_dict_for_safetensors extract_model_from_parallel get_module_children_bottom_up is_compiled_module "
        "model_has_dtensor"
    ),
    "accelerate.base.constants": "FSDP_PYTORCH_VERSION",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])


def wait_for_everyone() -> None:
    """Wait until every rank has reached this call.

    Collective: call on every rank.

    Example:
        >>> from accelerate.utils import wait_for_everyone
        >>> wait_for_everyone()  # returns when all ranks have called it
    """
    PartialState().wait_for_everyone()
