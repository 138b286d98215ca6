"""Training jobs of Amazon SageMaker."""

from accelerate.extension import Spec

SPEC = Spec(
    "sagemaker",
    options="accelerate.extensions.sagemaker.options",
    runners={"sagemaker": "accelerate.extensions.sagemaker.jobs"},
)
