"""Models of transformers, sharded: they train as on one process, and what is saved of them loads again.

accelerate launch --cpu --num_processes 2 sharded_models.py FOLDER [all | CHECK ...]
"""

import functools
import os
import sys
import warnings
from contextlib import contextmanager

import torch
import transformers
from tiny import report
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin

LENGTH, WORDS, BATCH, WINDOW, UPDATES = 12, 32, 4, 2, 3
EXACT = 1e-5
VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
SPECIAL = {"vocab_size": WORDS, "pad_token_id": 0, "eos_token_id": 2}


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SPECIAL, **sizes, num_attention_heads=2, num_key_value_heads=2)
    )


def gpt2():
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SPECIAL, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**SPECIAL, **sizes}, dropout_rate=0.0))


MODELS = {"llama": llama, "gpt2": gpt2, "t5": t5}


def seeded(make, seed=0):
    transformers.set_seed(seed)
    return make().train()


def batches():
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, WORDS, (WINDOW * UPDATES, BATCH, LENGTH), generator=generator)


def adam(parameters):
    """Return AdamW. Its eps is above the noise of gradients that are zero in exact arithmetic, as those of key biases are."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def alone(model):
    optimizer, losses, norms = adam([p for p in model.parameters() if p.requires_grad]), [], []
    for step, ids in enumerate(batches()):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / WINDOW).backward()
        losses.append(loss.item())
        if (step + 1) % WINDOW == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, model.state_dict()


def train(accelerator, model, optimizer):
    """Train on this rank's share of each batch; return the losses and norms, which are those of the whole batch."""
    rows, losses, norms = BATCH // accelerator.num_processes, [], []
    for ids in batches()[:, accelerator.process_index * rows :][:, :rows]:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, norms


def same(mine, other, limit, what):
    assert mine.keys() == other.keys(), (what, sorted(mine.keys() ^ other.keys()))
    for name, tensor in mine.items():
        distance = (tensor.float() - other[name].float()).abs().max().item()
        assert distance <= limit, (what, name, distance)


def close(mine, other, what):
    assert len(mine) == len(other), (what, mine, other)
    assert max(abs(a - b) for a, b in zip(mine, other, strict=True)) <= EXACT, (what, mine, other)


@contextmanager
def accelerator_of(version, plugin=None, **options):
    """Give an Accelerator, without a version one of DDP, that shares nothing but the process group with those before it."""
    kept = {name: os.environ.get(name) for name in VARIABLES}
    GradientState._reset_state()
    AcceleratorState._reset_state(True)
    try:
        settings = {"auto_wrap_policy": "transformer_based_wrap", **(plugin or {})}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **settings) if version else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=WINDOW, **options)
        yield accelerator
        accelerator.free_memory()
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def units(model):
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return sum(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())


def trains_as_one(folder, version, name):
    what = f"{name} under FSDP{version}"
    losses, norms, weights = alone(seeded(MODELS[name]))
    with accelerator_of(version) as accelerator:
        model = seeded(MODELS[name])
        model, optimizer = accelerator.prepare(model, adam(model.parameters()))
        # The root, and two layers in each stack.
        assert units(model) == (5 if name == "t5" else 3), (what, units(model), model)
        mine, mine_norms = train(accelerator, model, optimizer)
        close(mine, losses, what)
        close(mine_norms, norms, what)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            same(state, weights, EXACT, what)
        exports(accelerator, model, state, f"{folder}/{name}{version}")


def exports(accelerator, model, state, folder):
    bare = accelerator.unwrap_model(model)
    # A copy: save_pretrained empties the dict that it is given.
    bare.save_pretrained(f"{folder}/pretrained", is_main_process=accelerator.is_main_process, state_dict=dict(state))
    accelerator.save_model(model, f"{folder}/weights")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        read = type(bare).from_pretrained(f"{folder}/pretrained")
        same(read.state_dict(), state, 0.0, f"save_pretrained in {folder}")
        type(bare).config_class.from_pretrained(f"{folder}/pretrained").save_pretrained(f"{folder}/weights")
        same(type(bare).from_pretrained(f"{folder}/weights").state_dict(), state, 0.0, f"save_model in {folder}")
    accelerator.wait_for_everyone()


def generates(folder, version):
    options = {"max_new_tokens": 5, "do_sample": False}
    with accelerator_of(version) as accelerator:
        model = seeded(llama)
        model, optimizer = accelerator.prepare(model, adam(model.parameters()))
        train(accelerator, model, optimizer)
        model.eval()
        words = batches()[0]
        with torch.no_grad(), accelerator.whole_parameters(model):
            found = model.generate(words, **options)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            plain = seeded(llama, seed=1).eval()
            plain.load_state_dict(state)
            assert torch.equal(found, plain.generate(words, **options)), found
        told = accelerator.gather(found)
        assert torch.equal(told[: len(words)], told[len(words) :]), told


def lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def trains_adapter(folder, version):
    """Only the adapter moves, as on one process; it loads into another model; checkpoints may hold it alone."""
    what, folder = f"LoRA under FSDP{version}", f"{folder}/lora{version}"
    losses, norms, weights = alone(seeded(lora))
    with accelerator_of(version, {"use_orig_params": True} if version == 1 else {}) as accelerator:
        model = seeded(lora)
        model, optimizer = accelerator.prepare(model, adam([p for p in model.parameters() if p.requires_grad]))
        assert units(model) == 3, what
        mine, mine_norms = train(accelerator, model, optimizer)
        close(mine, losses, what)
        close(mine_norms, norms, what)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            same(state, weights, EXACT, what)
            # Under FSDP1 PEFT finds no adapter among modules that are wrapped, and saves an empty one; any copy's can be used.
            plain = accelerator.unwrap_model(model) if version == 2 else seeded(lora, seed=1)
            plain.save_pretrained(folder, state_dict=state)
            loaded_adapter(folder, state)
        accelerator.wait_for_everyone()
        accelerator.save_state(f"{folder}/small", adapter_only=True)
        accelerator.save_state(f"{folder}/whole")
        first = train(accelerator, model, optimizer)
        after = accelerator.get_state_dict(model)
        for name, options in (("small", {"adapter_only": True}), ("whole", {})):
            accelerator.load_state(f"{folder}/{name}", **options)
            assert train(accelerator, model, optimizer) == first, (what, name)
            same(accelerator.get_state_dict(model), after, 0.0, f"{what}, {name}")


def loaded_adapter(folder, state):
    from peft import PeftModel

    got = PeftModel.from_pretrained(seeded(llama), folder).state_dict()
    adapter = {name for name in state if "lora_" in name}
    assert len(adapter) == 8, adapter
    same({name: got[name] for name in adapter}, {name: state[name] for name in adapter}, 0.0, folder)


def loads_on_one_rank(folder, version):
    """`cpu_ram_efficient_loading`: what rank 0 read reaches all ranks, and so do buffers that no file holds."""
    from transformers.integrations.fsdp import is_fsdp_enabled

    source = f"{folder}/source{version}"
    saved = seeded(llama)
    plain = saved.eval()(input_ids=batches()[0]).logits
    with accelerator_of(version, {"cpu_ram_efficient_loading": True, **LOADING[version]}) as accelerator:
        assert is_fsdp_enabled(), "transformers must know before it reads the weights"
        if accelerator.is_main_process:
            saved.save_pretrained(source)
        accelerator.wait_for_everyone()
        model = transformers.AutoModelForCausalLM.from_pretrained(source).train()
        if not accelerator.is_main_process:
            with torch.no_grad():  # whatever they have does not count
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(7.0)
        model, _ = accelerator.prepare(model, adam(model.parameters()))
        with torch.no_grad():
            logits = model.eval()(input_ids=batches()[0]).logits
        assert (logits - plain).abs().max() <= EXACT, (version, accelerator.process_index)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            same(state, saved.state_dict(), 0.0, f"rank 0's weights under FSDP{version}")
    assert not is_fsdp_enabled()


LOADING = {1: {"sync_module_states": True}, 2: {}}
ABILITIES = {
    **{name: functools.partial(trains_as_one, name=name) for name in MODELS}, "generate": generates,
    "loading": loads_on_one_rank, "lora": trains_adapter,
}  # fmt: skip
# Each ability once, and both versions; `all` runs every one under both.
QUICK = ["gpt2 2", "t5 1", "generate 2", "loading 1", "lora 2"]


def main():
    folder, *chosen = sys.argv[1:]
    warnings.simplefilter("ignore", FutureWarning)
    every = [f"{name} {version}" for name in ABILITIES for version in (2, 1)]
    checks = every if chosen == ["all"] else chosen or QUICK
    for check in checks:
        name, version = check.split()
        ABILITIES[name](folder, int(version))
    report(passed=len(checks))


if __name__ == "__main__":
    main()
