"""The questions about machines of one's own, which are not written yet, and the words they accept."""

from typing import NoReturn

from accelerate.commands.config.config import get_user_input
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS
from accelerate.utils.constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
    TORCH_DYNAMO_MODES,
)

__all__ = [
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DYNAMO_BACKENDS",
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "TORCH_DYNAMO_MODES",
    "get_cluster_input",
]


def get_cluster_input() -> NoReturn:
    """Ask for the settings of machines of one's own; not available yet.

    Raises:
        NotAvailableError: always.
    """
    get_user_input()
