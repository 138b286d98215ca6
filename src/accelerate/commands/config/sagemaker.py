"""The questions about Amazon SageMaker, which are not written yet, and the words they accept."""

from typing import NoReturn

from accelerate.commands.config.config import get_user_input
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS
from accelerate.utils.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES, TORCH_DYNAMO_MODES

__all__ = ["DYNAMO_BACKENDS", "SAGEMAKER_PARALLEL_EC2_INSTANCES", "TORCH_DYNAMO_MODES", "get_sagemaker_input"]


def get_sagemaker_input() -> NoReturn:
    """Ask for the settings of SageMaker jobs; not available yet.

    Raises:
        NotAvailableError: always.
    """
    get_user_input()
