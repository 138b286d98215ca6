"""Expert parallelism: each rank holds some of the experts of a layer, and tokens travel to them.

`ep_size` ranks share the experts; they are taken from the ranks that share one copy of the model (`dp_shard_size`), so it does not
multiply the number of processes. Models of transformers with a plan for their experts (Mixtral, Qwen3-MoE and others) need nothing else.
The curve equals that of one process with the global batch.

    accelerate launch --cpu --num_processes 2 examples/by_feature/moe.py

Prints: 2 of 4 experts on each rank, same curve as one process: True
"""

import copy
import pydoc_data.topics

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import set_seed

BATCH, LENGTH, STEPS = 8, 32, 6


def train(
    model: torch.nn.Module, loader: torch.utils.data.DataLoader, accelerator: Accelerator | None = None
) -> torch.Tensor:
    """Train a pass over the loader, and return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean"))
    return torch.stack(losses).cpu()


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    mesh = ParallelismConfig(dp_shard_size=2, ep_size=2)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=mesh)
    set_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, pad_token_id=0)).train()
    text = "".join(pydoc_data.topics.topics.values()).encode()[: BATCH * LENGTH * STEPS]
    rows = torch.tensor(list(text)).view(-1, LENGTH)  # bytes are the tokens
    expected = train(copy.deepcopy(model), torch.utils.data.DataLoader(rows, batch_size=BATCH))
    found = train(model, torch.utils.data.DataLoader(rows, batch_size=BATCH // 2), accelerator)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    accelerator.print(f"losses {[round(loss, 4) for loss in found.tolist()]}")
    here, there = experts.to_local().shape[0], experts.shape[0]
    same = torch.allclose(found, expected, atol=1e-4)
    accelerator.print(f"{here} of {there} experts on each rank, same curve as one process: {same}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
