"""Loads a tiny Llama of transformers quantised with bitsandbytes, on the CPU, and prints what each check found.

Arguments: a folder for its files, then the checks to run; none for all. Only "tokens" runs on the peer's package too.
"""

import functools
import sys
from pathlib import Path

import torch
from tiny import report
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, set_seed

FOLDER = Path(sys.argv[1])
IDS = torch.arange(3, 17).reshape(2, 7)
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
PLACES = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
PLACES |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
OPTIONS = {
    "8": {"load_in_8bit": True},
    "4": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
}  # fmt: skip


@functools.cache
def checkpoint():
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
    path = FOLDER / "llama"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def loaded(bits, device_map=None, **options):
    return AutoModelForCausalLM.from_pretrained(
        checkpoint(), quantization_config=BitsAndBytesConfig(**OPTIONS[bits]),
        device_map={"": "cpu"} if device_map is None else device_map, dtype=torch.float32, **options,
    ).eval()  # fmt: skip


def generated(model):
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY)[:, IDS.shape[1] :].tolist()


def tokens():
    maps = ({"": "cpu"}, "cpu", "auto")
    return {f"{bits} {places}": generated(loaded(bits, places)) for bits in OPTIONS for places in maps}


@torch.no_grad()
def same(bits):
    from accelerate import init_empty_weights
    from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model

    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint()))
    model.tie_weights()
    config = BnbQuantizationConfig(**OPTIONS[bits], torch_dtype=torch.float32)
    model = load_and_quantize_model(model, config, checkpoint()).eval()
    return {"same": torch.equal(model(IDS).logits, loaded(bits)(IDS).logits)}


@torch.no_grad()
def offloaded(bits):
    """The model that transformers loaded, offloaded to disk: logits, tokens with a cache, state dict, and back again."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    whole = loaded(bits)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    logits, wanted = whole(IDS).logits, generated(whole)
    model = dispatch_model(loaded(bits), PLACES, offload_dir=FOLDER / f"offload{bits}")
    elsewhere = sum(tensor.is_meta for tensor in model.parameters())
    found = {
        "offloaded": elsewhere > 5, "logits": all(torch.equal(model(IDS).logits, logits) for _ in range(2)),
        "tokens": generated(model) == wanted,
    }  # fmt: skip
    gathered = get_state_dict_offloaded_model(model)
    found["names"] = gathered.keys() == state.keys()
    # What ran on the CPU may be packed there in another way; what is offloaded is as it was stored.
    kept = [name for name in state if name.startswith(("model.layers.0.", "lm_head"))]
    found["state"] = all(torch.equal(gathered[name], state[name]) for name in kept)
    remove_hook_from_submodules(model)
    found["back"] = not any(tensor.is_meta for tensor in model.parameters())
    found["tokens after"] = generated(model) == wanted
    return found


def lora(bits):
    from peft import LoraConfig, get_peft_model

    from accelerate import Accelerator

    set_seed(0)
    base = loaded(bits)
    weight = base.model.layers[1].mlp.up_proj.weight
    before = weight.data.clone()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")).train()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "same weights": torch.equal(weight.data, before)}


CHECKS = {"tokens": tokens}
for name in OPTIONS:
    CHECKS[f"same {name}"] = functools.partial(same, name)
    CHECKS[f"offloaded {name}"] = functools.partial(offloaded, name)
    CHECKS[f"lora {name}"] = functools.partial(lora, name)
if __name__ == "__main__":
    wanted = sys.argv[2:] or list(CHECKS)
    report(checks={name: CHECKS[name]() for name in wanted})
