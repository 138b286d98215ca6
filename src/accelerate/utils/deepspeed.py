"""The objects that `prepare` returns under DeepSpeed. The public path of `accelerate.extensions.deepspeed.wrappers`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.deepspeed.wrappers": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler "
        "get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed"
    ),
    "accelerate.extensions.deepspeed.plugin": "DeepSpeedPlugin HfDeepSpeedConfig",
    "accelerate.optimizer": "AcceleratedOptimizer",
    "accelerate.scheduler": "AcceleratedScheduler",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
