"""Start a training function in several processes. The public path of `accelerate.extensions.notebook.launchers`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.notebook.launchers": (
        "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION MeetingError WorkerError WorkerFailure debug_launcher notebook_launcher test_launch"
    ),
    "accelerate.base.environment": "patch_environment",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
