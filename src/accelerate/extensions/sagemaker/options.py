"""Options of a job of Amazon SageMaker."""

from accelerate.config.options.schema import Feature, rows

_aws = rows("AWS Arguments", key="", feature="sagemaker", chapter="other", before="compute_environment")

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
        interview="accelerate.commands.config.sagemaker:ask_sagemaker",
    ),
}
