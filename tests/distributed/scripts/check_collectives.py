"""Trains a small Llama for an epoch, and prints what rank 1 has sent in the last step: started for real, and simulated.

Arguments: the folder for a checkpoint, or "-" for none; "experts" for a Mixtral whose experts are spread over the ranks.
"""

import contextlib
import json
import sys
from dataclasses import astuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from accelerate import Accelerator, ParallelismConfig
from accelerate.extensions.reports.collectives import CollectiveRecorder

LENGTH, VOCABULARY = 32, 128
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(folder: str, *experts: str) -> None:
    with CollectiveRecorder() as recorder:
        spread = {"parallelism_config": ParallelismConfig(dp_shard_size=2, ep_size=2)} if experts else {}
        accelerator = Accelerator(**spread)
        torch.manual_seed(0)
        if experts:
            sizes = {**SIZES, "num_key_value_heads": 4, "num_local_experts": 4}
            model = MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=VOCABULARY))
        else:
            model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=VOCABULARY))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(torch.randint(0, VOCABULARY, (61, LENGTH)), batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        recorder.name(accelerator.torch_device_mesh)
        for batch in loader:
            shares = contextlib.nullcontext()
            layout = accelerator.parallelism_config
            if layout is not None and (layout.cp_enabled or layout.sp_enabled):
                shares = accelerator.maybe_context_parallel([batch], [1], {batch})
            with shares:
                accelerator.backward(model(input_ids=batch).logits.float().pow(2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            calls = [list(astuple(call)) for call in recorder.take()]
        plan = accelerator.data_plan(loader)
        if folder != "-":
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    if accelerator.process_index == 1:
        shapes = [list(getattr(each, "_local_tensor", each).shape) for each in model.parameters()]
        found = {"calls": calls, "shapes": shapes, "batches": plan.own.batches, "read": plan.own.samples}
        print("FOUND", json.dumps(found))


main(*sys.argv[1:])
