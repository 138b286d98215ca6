"""Start a training function in several processes. The public path of `accelerate.extensions.notebook.launchers`."""

from accelerate.base._lazy import front
from accelerate.base.constants import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)

_HOMES = {
    "accelerate.extensions.notebook.launchers": (
        "MeetingError WorkerError WorkerFailure debug_launcher notebook_launcher test_launch"
    ),
    "accelerate.base.environment": "patch_environment",
}
_EAGER = ["ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION"]
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [], _EAGER)
