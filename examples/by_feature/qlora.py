"""QLoRA: train small adapters on a model whose weights are kept in 4 bits.

bitsandbytes keeps the weights, PEFT adds adapters, and `prepare` takes both as an ordinary model: under DDP as here, and under FSDP2. The
base does not change, bit for bit, and only the adapters are saved. The model is a small Llama over the bytes of Python's documentation,
made here. It runs on a CPU as well, and needs `pip install transformers peft bitsandbytes`.

    accelerate launch --cpu --num_processes 2 examples/by_feature/qlora.py

Prints: the loss fell, the 4-bit base is unchanged, adapters are equal on 2 ranks and under a third of the weights: True
"""

import pathlib
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator
from accelerate.utils import set_seed

LENGTH, STEPS = 64, 40


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    folder = pathlib.Path("out/qlora")
    with accelerator.main_process_first():  # a model of your own would come from the Hub
        if accelerator.is_main_process:
            sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
            LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder / "base")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", quantization_config=quantised, dtype=torch.float32, device_map={"": accelerator.device}
    )
    # The output layer trains whole: the random base has nothing in it yet. A base of your own needs the adapters alone.
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
    model = get_peft_model(base, lora)
    frozen = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    adapters = [each for each in model.parameters() if each.requires_grad]
    share = sum(each.numel() for each in adapters) / base.num_parameters()

    text = "\n".join(topics[key] for key in sorted(topics)).encode("ascii", "replace")
    rows = torch.tensor(list(text[: 8 * LENGTH * STEPS * accelerator.num_processes])).view(-1, LENGTH)
    loader = DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(adapters, lr=1e-2), loader)
    losses = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(f"loss {losses[0]:.3f} ... {losses[-1]:.3f}, adapters are {share:.1%} of the weights")

    trained = accelerator.unwrap_model(model)
    unchanged = all(torch.equal(dict(trained.named_parameters())[name], each) for name, each in frozen.items())
    ranks = accelerator.gather(torch.stack([each.double().sum() for each in adapters])[None])
    equal = bool((ranks == ranks[0]).all())
    if accelerator.is_main_process:
        trained.save_pretrained(folder / "adapter")
    shown = losses[-1] < losses[0] - 0.5 and unchanged and equal and share < 1 / 3
    accelerator.print(
        f"the loss fell, the 4-bit base is unchanged, adapters are equal on {accelerator.num_processes} ranks and under "
        f"a third of the weights: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
