"""The interview about Amazon SageMaker. The public path of `accelerate.extensions.sagemaker.interview`."""

from accelerate.base._lazy import front
from accelerate.base.constants import TORCH_DYNAMO_MODES  # noqa: F401

_HOMES = {
    "accelerate.extensions.sagemaker.interview": (
        "SAGEMAKER_PARALLEL_EC2_INSTANCES _create_iam_role_for_sagemaker _get_iam_role_arn ask_sagemaker get_sagemaker_input"
    ),
    "accelerate.extensions.configure.config_args": "SageMakerConfig",
    "accelerate.extensions.configure.config_utils": "DYNAMO_BACKENDS",
    "accelerate.config.enums": "ComputeEnvironment",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
