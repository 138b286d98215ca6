"""What `prepare` returns under DeepSpeed. The public path of `accelerate.strategies.deepspeed.wrappers`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.strategies.deepspeed.wrappers": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler "
        "get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed"
    ),
    "accelerate.config.deepspeed": "DeepSpeedPlugin HfDeepSpeedConfig",
    "accelerate.optimizer": "AcceleratedOptimizer",
    "accelerate.scheduler": "AcceleratedScheduler",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
