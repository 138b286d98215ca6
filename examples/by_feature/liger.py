"""Liger's kernels in a Llama, under DDP and FSDP2: how they are switched on, and that losses stay equal.

Patch the classes before the model is built; strategies then see an ordinary module. The kernels are written in Triton for GPUs. Without
one, `TRITON_INTERPRET=1` runs them operation by operation on the CPU: slow, and enough to compare losses. Triton's interpreter (3.9) fails
in Liger's RMS norm and SwiGLU, so on a CPU they stay as they are. It needs `pip install transformers liger-kernel triton`; `make test-liger` runs it.

    TRITON_INTERPRET=1 accelerate launch --cpu --num_processes 2 examples/by_feature/liger.py

Prints: rotary embedding and fused cross entropy by Liger, losses equal under DDP and FSDP2 on 2 ranks: True
"""

from pydoc_data.topics import topics

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from torch.utils.data import DataLoader
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

LENGTH, STEPS = 32, 4


def train(sharded: bool) -> torch.Tensor:
    """Train four steps of a small Llama over bytes, and return the mean loss of each. Collective: call on every rank."""
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin if sharded else None)
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # By its module: the class that is patched, not one that was imported before.
    model = modeling_llama.LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))
    text = "\n".join(topics[key] for key in sorted(topics)).encode("ascii", "replace")
    rows = torch.tensor(list(text[: 2 * LENGTH * STEPS * accelerator.num_processes])).view(-1, LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    losses = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    accelerator.free_memory()
    return torch.stack(losses).cpu()


def main() -> None:
    expected = {sharded: train(sharded) for sharded in (False, True)}
    gpu = torch.cuda.is_available()
    apply_liger_kernel_to_llama(
        rope=True, rms_norm=gpu, swiglu=gpu, cross_entropy=False, fused_linear_cross_entropy=True
    )
    found = {sharded: train(sharded) for sharded in (False, True)}
    accelerator = Accelerator()
    for sharded, name in ((False, "DDP"), (True, "FSDP2")):
        difference = (found[sharded] - expected[sharded]).abs().max()
        accelerator.print(f"{name}: last loss {found[sharded][-1]:.6f}, largest difference {difference:.1e}")
    same = all(torch.allclose(found[sharded], expected[sharded], atol=1e-2 if gpu else 1e-5) for sharded in found)
    accelerator.print(
        f"rotary embedding and fused cross entropy by Liger, losses equal under DDP and FSDP2 on "
        f"{accelerator.num_processes} ranks: {same}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
