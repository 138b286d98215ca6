"""A hand-written loop over a PEFT LoRA model, with a checkpoint of the adapter."""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import TokenRows, causal_model, report

from accelerate import Accelerator
from accelerate.utils import set_seed

folder = sys.argv[1]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = causal_model()
set_seed(1)
config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
model = get_peft_model(model, config)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
loader = torch.utils.data.DataLoader(TokenRows(32), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    unwrapped.save_pretrained(folder, state_dict=accelerator.get_state_dict(model))
accelerator.wait_for_everyone()
restored = PeftModel.from_pretrained(causal_model(), folder)
restored.eval(), unwrapped.eval()
probe = TokenRows(2, seed=9)[0]["input_ids"][None]
assert torch.allclose(restored(probe).logits, unwrapped(probe).logits, atol=1e-6)
report(lora_loop=losses)
accelerator.end_training()
