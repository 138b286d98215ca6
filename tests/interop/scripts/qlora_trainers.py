"""LoRA on a base model of 4 bits, trained by the Trainer, by TRL's SFTTrainer and by a loop, on this package and on the peer's.

`qlora_trainers.py FOLDER CASE ...`: a case is a way to train with words: `sft+checkpointing`. With `quantised`, the base model is packed
by `load_and_quantize_model` instead of by transformers. A case reports the losses of all ranks and a digest of the adapter's weights.
"""

import hashlib
import itertools
import sys
import traceback
from pathlib import Path

import tiny
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from accelerate import Accelerator, init_empty_weights
from accelerate.state import PartialState
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model

FOLDER = Path(sys.argv[1])
STEPS, GLOBAL_BATCH = 4, 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
COMMON = {
    "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "seed": 3, "bf16": False, "per_device_train_batch_size": GLOBAL_BATCH // tiny.ranks(),
}  # fmt: skip


def write_base():
    state = PartialState(cpu=True)
    with state.main_process_first():
        if state.is_main_process:
            set_seed(0)
            config = LlamaConfig(**SIZES, vocab_size=24, num_key_value_heads=2, pad_token_id=0, eos_token_id=4)
            LlamaForCausalLM(config).save_pretrained(FOLDER / "base")


def base_model(words):
    options = {**FOUR_BITS, "bnb_4bit_use_double_quant": "double" in words}
    set_seed(0)
    if "quantised" in words:
        with init_empty_weights():
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(FOLDER / "base"))
        model.tie_weights()
        return load_and_quantize_model(
            model, BnbQuantizationConfig(**options, torch_dtype=torch.float32), FOLDER / "base", device_map={"": "cpu"}
        )
    return AutoModelForCausalLM.from_pretrained(
        FOLDER / "base", quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32, device_map={"": "cpu"}
    )


def train_with_trainer(words):
    checkpointing = "checkpointing" in words
    model = prepare_model_for_kbit_training(base_model(words), use_gradient_checkpointing=checkpointing)
    arguments = TrainingArguments(str(FOLDER), **COMMON, gradient_checkpointing=checkpointing)
    kind = type("ExactTrainer", (tiny.Exact, Trainer), {})
    trainer = kind(get_peft_model(model, LORA), arguments, train_dataset=tiny.TokenRows(32))
    trainer.train()
    return trainer.losses, trainer.model


def train_with_sft(words):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    kind = type("ExactTrainer", (tiny.Exact, SFTTrainer), {})
    trainer = kind(
        model=base_model(words), peft_config=LORA, processing_class=tiny.tokenizer(),
        args=SFTConfig(str(FOLDER), **COMMON, gradient_checkpointing="checkpointing" in words, max_length=16),
        train_dataset=Dataset.from_dict({"text": tiny.sentences(32)}),
    )  # fmt: skip
    trainer.train()
    return trainer.losses, trainer.model


def train_in_a_loop(words):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if "bf16" in words else "no")
    model = get_peft_model(base_model(words), LORA).train()
    if "checkpointing" in words:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(tiny.TokenRows(32), GLOBAL_BATCH // tiny.ranks(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    set_seed(3)
    losses = []
    for batch in itertools.islice(loader, STEPS):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses, accelerator.unwrap_model(model)


WAYS = {"trainer": train_with_trainer, "sft": train_with_sft, "loop": train_in_a_loop}


def run(words):
    losses, model = WAYS[words[0]](words)
    packed = [name for name, weight in model.named_parameters() if getattr(weight, "quant_state", None) is not None]
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            digest.update(parameter.detach().float().numpy().tobytes())
    return {"losses": tiny.everywhere(losses), "weights": tiny.everywhere(digest.hexdigest()), "packed": len(packed)}


def main():
    write_base()
    reports = {}
    for case in sys.argv[2:]:
        with tiny.apart():
            try:
                reports[case] = run(case.split("+"))
            except Exception:
                reports[case] = {"error": traceback.format_exc()[-3000:]}
    tiny.report(**reports)


if __name__ == "__main__":
    main()
