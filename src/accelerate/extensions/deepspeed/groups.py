"""How DeepSpeed learns of the process group."""

import os

import torch.distributed as dist

from accelerate.runtime import rendezvous
from accelerate.runtime.ranks import ALONE


def join(backend: str | None, device: str, local_rank: int) -> None:
    """Let DeepSpeed talk through the process group that is alive, or one of this process. Every rank, before anything else of it.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    os.environ.setdefault("LOCAL_RANK", str(local_rank))  # its engines read them, also in a single process
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it would take an available GPU
    import torch._dynamo  # noqa: F401  before `zero.Init` replaces functions of torch that it looks at

    try:
        import deepspeed
    except ImportError as error:
        raise ImportError("DeepSpeed was requested and is not installed: pip install deepspeed") from error
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        # On CPUs each start would build it, for minutes, and wait without end for the lock of a build that was killed. It is only
        # used in tensor-parallel inference, where gloo replaces it.
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
    if not dist.is_initialized():
        backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
        rendezvous.init_process_group(ALONE, backend)
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
