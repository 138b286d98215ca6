"""Long sequences: two ranks share each sequence (context parallelism).

Activations grow with the length of a sequence. With `cp_size=2` each rank has half of the tokens, and attention exchanges keys and values.
Labels are shifted before the sequence is cut, and `aggregate_loss` makes the loss the mean over all tokens. `sp_size=2` with
`sp_backend="torch"` cuts by heads instead, with the same loop.

    accelerate launch --cpu --num_processes 2 examples/by_feature/long_text.py

Prints: 128 of 256 tokens on each rank, same curve as complete sequences in one process: True
"""

import copy
import pydoc_data.topics

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import aggregate_loss, set_seed, shift_labels

BATCH, LENGTH, STEPS = 2, 256, 4


def plain_curve(model: torch.nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    """Train on whole sequences, without Accelerate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in batches:
        logits = model(input_ids=ids).logits
        loss = cross_entropy(logits.flatten(0, 1), shift_labels(ids).flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2))
    set_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    text = "".join(pydoc_data.topics.topics.values()).encode()[: BATCH * LENGTH * STEPS]
    batches = list(torch.tensor(list(text)).view(STEPS, BATCH, LENGTH))  # the same on both ranks
    expected = plain_curve(copy.deepcopy(model), batches)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    group = accelerator.torch_device_mesh["cp"]
    losses = []
    for batch in batches:
        ids = batch.clone().to(accelerator.device)
        labels = shift_labels(ids)  # of the whole sequence, before it is cut
        with accelerator.maybe_context_parallel(
            buffers=[ids, labels], buffer_seq_dims=[1, 1], no_restore_buffers={ids, labels}
        ):
            tokens = ids.shape[1]
            logits = model(input_ids=ids).logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss = aggregate_loss(loss, (labels != -100).sum(), group=group)
            accelerator.backward(loss)  # inside, too
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    accelerator.print(f"losses {[round(loss.item(), 4) for loss in losses]}")
    same = torch.allclose(torch.stack(losses), expected, atol=1e-4)
    accelerator.print(
        f"{tokens} of {LENGTH} tokens on each rank, same curve as complete sequences in one process: {same}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
