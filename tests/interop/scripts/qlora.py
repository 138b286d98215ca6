"""Adapters on a 4-bit model train, evaluate and train on under FSDP2 as under DDP; what is saved continues elsewhere.

accelerate launch --cpu --num_processes 2 qlora.py FOLDER [save | load]
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sharded_models import EXACT, WORDS, accelerator_of, adam, alone, batches, close, llama, same, seeded, train
from tiny import report
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from accelerate.utils import gather_object

FOLDER = Path(sys.argv[1])
SWITCH = "support_avx512bf16_for_cpu"
EPOCHS = 3
# Bitsandbytes packs layers of these sizes.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2}


def base(storage=torch.float32, double=False, **options):
    options = options or {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": storage,
        "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": double,
    }  # fmt: skip
    config = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(FOLDER / "base", quantization_config=config, dtype=torch.float32)


def qlora(**options):
    """Both factors of the adapters are random. The switch is as on a processor for which bitsandbytes packs."""
    targets = ["q_proj", "v_proj", "up_proj"]
    model = base(**options)
    for module in model.modules():
        if hasattr(module, SWITCH):
            setattr(module, SWITCH, True)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))


def prepared(accelerator, make=qlora):
    model = seeded(make)
    return accelerator.prepare(model, adam([p for p in model.parameters() if p.requires_grad]))


def evaluated(accelerator, model):
    rows = batches()[0].chunk(accelerator.num_processes)[accelerator.process_index]
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    model.train()
    return accelerator.reduce(loss, "mean").item()


def whole(accelerator, model):
    """The state on rank 0; what is frozen as bytes, because packed numbers mean nothing as what they are stored as."""
    state = accelerator.get_state_dict(model)
    return {
        name: value.clone() if "lora_" in name else value.flatten().clone().view(torch.uint8)
        for name, value in state.items()
    }


def run(version, make=qlora):
    with accelerator_of(version) as accelerator:
        model, optimizer = prepared(accelerator, make)
        assert not any(getattr(module, SWITCH, False) for module in model.modules())
        before = whole(accelerator, model)
        found = []
        for _ in range(EPOCHS):
            losses, norms = train(accelerator, model, optimizer)
            found += [*losses, *norms, evaluated(accelerator, model)]
        state = whole(accelerator, model)
        changed = {name for name, value in state.items() if not torch.equal(value, before[name])}
        assert changed == {name for name in state if "lora_" in name}, changed
        folder = str(FOLDER / f"state{version}")
        accelerator.save_state(folder)
        after, _ = train(accelerator, model, optimizer)
        accelerator.load_state(folder)
        assert train(accelerator, model, optimizer)[0] == after, version
        if version:
            half = [module.weight for module in model.modules() if getattr(module, "quant_state", None) is not None]
            assert half and all(weight.to_local().numel() * 2 == weight.numel() for weight in half)
            model.load_state_dict(model.state_dict())
        return found, after, state


def trains_as_ddp(**options):
    """FSDP2's losses, norms, weights and scales are DDP's, and each continues with what the other saved."""
    found, after, state = run(None, lambda: qlora(**options))
    sharded, sharded_after, sharded_state = run(2, lambda: qlora(**options))
    close(sharded, found, options)
    close(sharded_after, after, options)
    losses, norms, _ = alone(seeded(lambda: qlora(**options)))
    close(found[: len(losses) + len(norms)], [*losses, *norms], "alone")
    if sharded_state:
        same(sharded_state, state, EXACT, options)
        assert any(name.endswith("weight.absmax") for name in state)
    for version, other in ((2, None), (None, 2)):
        with accelerator_of(version) as accelerator:
            model, optimizer = prepared(accelerator, lambda: qlora(**options))
            accelerator.load_state(str(FOLDER / f"state{other}"))
            close(train(accelerator, model, optimizer)[0], after, f"FSDP{version} from FSDP{other}")


def streams_what_is_packed(accelerator, model):
    """A cast leaves 4-bit numbers, which are stored as float32 here, and their scales as they are."""
    state, found = gather_object([whole(accelerator, model)])[0], {}
    packed = tuple(name.removesuffix(".absmax") for name in state if name.endswith(".absmax"))
    for bucket in accelerator.stream_weights(model, dtype=torch.bfloat16):
        found |= bucket
    assert packed and found.keys() == state.keys(), found.keys() ^ state.keys()
    for name, value in found.items():
        kept = name.startswith(packed)
        assert (value.dtype == torch.bfloat16) is not kept, (name, value.dtype)
        assert not kept or torch.equal(value.flatten().view(torch.uint8), state[name]), name


def saves_the_adapter():
    with accelerator_of(2) as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer)
        streams_what_is_packed(accelerator, model)
        loss = evaluated(accelerator, model)
        accelerator.save_adapter(model, FOLDER / "adapter")
        if accelerator.is_main_process:
            read = PeftModel.from_pretrained(base(), FOLDER / "adapter").train()  # an evaluation would pack it
            rows = batches()[0]
            close([read(input_ids=rows, labels=rows).loss.item()], [loss], "the adapter")
        accelerator.wait_for_everyone()


def takes_rank_0s(efficient):
    with accelerator_of(None) as accelerator:
        wanted = train(accelerator, *prepared(accelerator))
    with accelerator_of(2, {"cpu_ram_efficient_loading": efficient}) as accelerator:

        def other():
            model = qlora()
            for parameter in model.parameters() if accelerator.process_index else ():
                parameter.data.fill_(7.0)
                if hasattr(parameter, "quant_state"):
                    parameter.quant_state.absmax.fill_(7.0)
            return model

        for mine, theirs in zip(train(accelerator, *prepared(accelerator, other)), wanted, strict=True):
            close(mine, theirs, f"rank 0's, {efficient=}")


def packed():
    """As if it had been evaluated on a processor for which bitsandbytes packs."""
    model = qlora()
    state = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.quant_state
    state.absmax = state.absmax[None]
    return model


def refuses(make, words, version=2, **options):
    with accelerator_of(version, **options) as accelerator:
        try:
            prepared(accelerator, make)
        except ValueError as error:
            assert words in str(error) and "layers.0.self_attn.q_proj" in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")


def goes_on(what):
    """Save on these ranks, or load what others have saved; return the losses after it, of a plain and of a 4-bit model."""
    found = {}
    for name, make in (("llama", llama), ("qlora", qlora)):
        with accelerator_of(2) as accelerator:
            model, optimizer = prepared(accelerator, make)
            if what == "save":
                train(accelerator, model, optimizer)
                accelerator.save_state(str(FOLDER / name))
            else:
                accelerator.load_state(str(FOLDER / name))
            found[name], _ = train(accelerator, model, optimizer)
    return found


def main():
    with accelerator_of(None) as accelerator, accelerator.main_process_first():
        if accelerator.is_main_process:
            config = LlamaConfig(vocab_size=WORDS, **SIZES, num_attention_heads=4, pad_token_id=0, eos_token_id=2)
            seeded(lambda: LlamaForCausalLM(config)).save_pretrained(FOLDER / "base")
    if len(sys.argv) > 2:
        return report(**goes_on(sys.argv[2]))
    trains_as_ddp()
    trains_as_ddp(storage=torch.uint8, double=True)
    saves_the_adapter()
    takes_rank_0s(efficient=True)
    takes_rank_0s(efficient=False)
    refuses(lambda: qlora(load_in_8bit=True), "8-bit")
    refuses(qlora, "bnb_4bit_quant_storage=torch.bfloat16", mixed_precision="bf16")
    refuses(packed, "before it was prepared", version=None)
    report(passed=True)


if __name__ == "__main__":
    main()
