"""A hand-written loop over a PEFT LoRA model, with a checkpoint of the adapter; with a ZeRO stage, one of the trained alone too."""

import glob
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import TokenRows, causal_model, report

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed

CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")


def build(stage=None):
    plugin = DeepSpeedPlugin(zero_stage=stage, zero3_save_16bit_model=True, gradient_clipping=1.0) if stage else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    model = causal_model()
    set_seed(1)
    model = get_peft_model(model, CONFIG)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    loader = torch.utils.data.DataLoader(TokenRows(32), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator, model, optimizer, loader):
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def resumed(accelerator, model, optimizer, loader, folder, stage):
    """Save without what is frozen, train on, and return that from the old engine and from a new one."""
    accelerator.save_state(folder, exclude_frozen_parameters=True)
    for file in glob.glob(f"{folder}/pytorch_model/*model_states.pt"):
        names = torch.load(file, weights_only=False)["module"]
        assert names and not any("base_layer" in name for name in names), sorted(names)
    on = train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    accelerator, *objects = build(stage)
    accelerator.load_state(folder, strict=False)
    return {"on": on, "resumed": train(accelerator, *objects)}


folder, *stage = sys.argv[1:]
accelerator, *objects = build(*map(int, stage))
model = objects[0]
losses = train(accelerator, *objects)
unwrapped = accelerator.unwrap_model(model)
if stage:
    accelerator.save_adapter(model, folder)
else:  # runs on upstream's package, too
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        unwrapped.save_pretrained(folder, state_dict=state)
    accelerator.wait_for_everyone()
restored = PeftModel.from_pretrained(causal_model(), folder)
restored.eval(), unwrapped.eval()
probe = TokenRows(2, seed=9)[0]["input_ids"][None]
assert torch.allclose(restored(probe).logits, unwrapped(probe).logits, atol=1e-6)
unwrapped.train()
more = resumed(accelerator, *objects, f"{folder}/state", int(stage[0])) if stage else {}
report(lora_loop=losses, **more)
accelerator.end_training()
