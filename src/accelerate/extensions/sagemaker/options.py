"""Options of a job of Amazon SageMaker."""

from accelerate.config.options.schema import Feature, rows

_aws = rows("AWS Arguments", key="", feature="sagemaker", chapter="other", before="compute_environment")

# Settings that only a file for SageMaker has; `SageMakerConfig` holds them.
KEYS = (
    *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "additional_args"),
    *("pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file"),
)
OPTIONS = (
    _aws("aws_access_key_id", "Access key of the AWS account."),
    _aws("aws_secret_access_key", "Secret key of the AWS account."),
)
FEATURES = {
    "sagemaker": Feature(
        "Amazon SageMaker",
        "compute_environment",
        wanted="AMAZON_SAGEMAKER",
        runners=("sagemaker",),
        interview="accelerate.extensions.sagemaker.interview:ask_sagemaker",
        keys=KEYS,
        words=("NO", "DATA_PARALLEL", "MODEL_PARALLEL"),
    ),
}
