"""Pipeline-parallel inference. The public path of `accelerate.extensions.inference.pippy`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.inference.pippy": (
        "build_pipeline find_pippy_batch_size generate_device_map ignorant_find_batch_size pippy_forward prepare_pippy"
    ),
    "accelerate.extensions.big_models.device_map": "infer_auto_device_map",
    "accelerate.comm.operations": "send_to_device",
    "accelerate.process": "PartialState",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
