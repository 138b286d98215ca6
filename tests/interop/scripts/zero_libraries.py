"""What transformers and PEFT ask of a DeepSpeed run: ranks that generate to different lengths, adapters with whole modules, AdaLoRA."""

import sys

import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from tiny import TokenRows, causal_model, report
from transformers import StoppingCriteria

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState

ATTENTION = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}


class EndsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores, **kwargs):
        return torch.full((ids.shape[0],), ids.shape[1] >= self.length)


def prepared(stage, model, **zero):
    """An engine of a model that was built whole; at stage 3 each weight is split, also a small one."""
    AcceleratorState._reset_state()
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"zero_optimization": {"stage": stage, **zero}, "train_batch_size": "auto"}
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config={**config, "train_micro_batch_size_per_gpu": "auto"}, zero3_init_flag=False
        ),
    )
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2)
    loader = torch.utils.data.DataLoader(TokenRows(8), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def generated():
    """Greedy tokens of rank 0, and of a rank that continues for longer, as the model alone has them."""
    model = causal_model().eval()
    prompt = TokenRows(2, seed=3)[0]["input_ids"][None, :4]
    how = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(prompt, **how)
    accelerator, engine, *_ = prepared(3, model)
    assert not hasattr(next(causal_model().parameters()), "ds_id")
    length = 8 + 6 * accelerator.process_index
    found = accelerator.unwrap_model(engine).eval().generate(prompt, stopping_criteria=[EndsAt(length)], **how)
    assert found.equal(wanted[:, :length]), (found, wanted)
    accelerator.free_memory()


def saved(stage, folder):
    model = get_peft_model(causal_model(), LoraConfig(r=4, modules_to_save=["wpe"], **ATTENTION))
    accelerator, engine, optimizer, loader = prepared(stage, model)
    for batch in loader:
        accelerator.backward(engine(**batch).loss)
    unwrapped = accelerator.unwrap_model(engine)
    whole = accelerator.get_state_dict(engine)
    unwrapped.save_pretrained(folder, state_dict=whole, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    restored = PeftModel.from_pretrained(causal_model(), folder).eval()
    probe = TokenRows(2, seed=9)[0]["input_ids"][None]
    engine.eval()
    assert torch.allclose(restored(probe).logits, engine(probe).logits, atol=1e-6)
    accelerator.free_memory()


def pruned():
    """AdaLoRA reads gradients between the engine's backward pass and its step, and takes ranks away."""
    plan = {"init_r": 4, "target_r": 2, "total_step": 8, "tinit": 1, "tfinal": 2, "deltaT": 1}
    accelerator, engine, _, loader = prepared(2, get_peft_model(causal_model(), AdaLoraConfig(**plan, **ATTENTION)))
    adapter, number = accelerator.unwrap_model(engine).base_model, 0
    for _ in range(4):
        for batch in loader:
            engine.backward(engine(**batch).loss)
            adapter.update_and_allocate(number)
            engine.step()
            number += 1
    left = adapter.peft_config["default"].rank_pattern
    assert left and sum(map(sum, left.values())) < 4 * len(left), left
    accelerator.free_memory()


folder, *_ = sys.argv[1:]
generated()
for stage in (2, 3):
    saved(stage, f"{folder}/{stage}")
pruned()
report(done=True)
