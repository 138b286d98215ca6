"""The GPUs of this machine, as `nvidia-smi` names them, and whether they can exchange data directly."""

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from typing import Any

from accelerate.base.environment import ask_nvidia_smi, parse_flag_from_env
from accelerate.runtime.peers import ProcessExtension

logger = logging.getLogger(__name__)


class PeerToPeer(ProcessExtension):
    """Sets what NCCL needs to know of GPUs that cannot exchange data directly."""

    @contextlib.contextmanager
    def joining(self, store: Any, rank: int, world_size: int) -> Iterator[None]:
        """Act before the process group exists, since NCCL may connect at once. Not a collective."""
        import torch  # here, since the functions below need no torch

        on_gpus = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
        if on_gpus and world_size > 1 and not check_cuda_p2p_ib_support():
            for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
                if name not in os.environ:
                    logger.warning("%s=1 is set: GPUs of this kind cannot exchange data directly.", name)
                    os.environ[name] = "1"
        yield


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of this machine's NVIDIA GPUs, and how many there are, without initialising CUDA.

    Raises:
        FileNotFoundError, subprocess.CalledProcessError: there is no `nvidia-smi`, or it failed.
    """
    names = ask_nvidia_smi("--query-gpu=name", "--format=csv,noheader")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver, for instance "550.40.07"; raises as `get_gpu_info`."""
    versions = ask_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    if not versions:
        raise ValueError("nvidia-smi reports no driver version; check that it lists a GPU.")
    return versions[0]


def check_cuda_p2p_ib_support() -> bool:
    """Tell whether several GPUs may use peer-to-peer copies and InfiniBand.

    GeForce RTX 40 cards cannot before driver 550.40.07: NCCL hangs unless both are switched off
    (`NCCL_P2P_DISABLE=1`, `NCCL_IB_DISABLE=1`). Without information the answer is True.
    """
    from packaging.version import parse

    try:
        names, count = get_gpu_info()
        affected = count > 1 and any("RTX 40" in name for name in names)
        return not affected or parse(get_driver_version()) >= parse("550.40.07")
    except (OSError, subprocess.SubprocessError, ValueError):
        return True
