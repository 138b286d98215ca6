"""What downstream libraries do with offloaded models, by whichever accelerate is installed: big_libraries.py FOLDER [CHECK ...]

Each check compares with the library's own result on the whole model, bit for bit, and returns facts that both packages
must agree on.
"""

import itertools
import logging
import os
import sys
from pathlib import Path

import big_hooks
import torch
import transformers
from big_checks import digest, run
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import SentenceTransformer
from tiny import bert_config, sentences, tokenizer

sys.path.append(str(Path(__file__).parents[2]))

from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils.modeling import get_state_dict_offloaded_model
from interop.tiny_models import MODELS, image, pipeline
from offload_samples import PREFETCHES, Reference, prefetching, same

KINDS = {
    "llama": transformers.AutoModelForCausalLM, "tied_llama": transformers.AutoModelForCausalLM, "mixtral": transformers.AutoModelForCausalLM,
    "t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM,
}  # fmt: skip


def places(**modules):
    return {name: place for place, names in modules.items() for name in names.split()}


MIXED = {
    "llama": big_hooks.MIXED, "tied_llama": places(disk="model lm_head"),
    "mixtral": places(
        cpu="model.layers.0.self_attn model.layers.0.input_layernorm model.layers.1 model.rotary_emb lm_head",
        disk="model.embed_tokens model.layers.0.mlp model.layers.0.post_attention_layernorm model.norm",
    ),
    "t5": places(
        cpu="shared decoder.embed_tokens decoder.block.0 decoder.dropout lm_head",
        disk="encoder decoder.block.1 decoder.final_layer_norm",
    ), "bert": places(cpu="bert.embeddings cls", disk="bert.encoder"),
    "unet": places(
        cpu="conv_in time_proj down_blocks.0 down_blocks.1.attentions conv_norm_out conv_act",
        disk="time_embedding down_blocks.1.resnets mid_block up_blocks conv_out",
    ),
}  # fmt: skip


def equal(mine, other, what):
    different = [i for i, (m, o) in enumerate(zip(mine, other, strict=True)) if not same(m, o)]
    assert not different, (what, "outputs", different, "of", len(mine))


def from_pretrained(name):
    """Return the check of `from_pretrained(device_map=...)` with one model, and of `save_pretrained` afterwards."""

    def check(folder):
        reference, saved, facts = Reference(MODELS[name], torch.float32, folder), folder / "saved", {}
        reference.make().save_pretrained(saved, max_shard_size="20KB")
        size = sum(parameter.nbytes for parameter in reference.make().parameters())
        prefetches = itertools.cycle(PREFETCHES)
        for dtype in (torch.float32, torch.bfloat16):
            whole = KINDS[name].from_pretrained(saved, dtype=dtype).eval()
            wanted, state = reference.run(whole), whole.state_dict()
            room = int(size * 0.6) // (1 if dtype == torch.float32 else 2)
            maps = {
                "cpu": {"device_map": "cpu"}, "disk": {"device_map": {"": "disk"}},
                "mixed": {"device_map": MIXED[name]}, "auto": {"device_map": "auto", "max_memory": {"cpu": room}},
                "sequential": {"device_map": "sequential", "max_memory": {"cpu": room}},
            }  # fmt: skip
            for way, options in maps.items():
                what, place = f"{way} {dtype}", folder / f"{way} {dtype}"
                with prefetching(next(prefetches)):
                    model = KINDS[name].from_pretrained(saved, dtype=dtype, offload_folder=place, **options).eval()
                    facts[what] = _as_whole(reference, model, wanted, state, what)
                    if way in ("disk", "auto"):
                        model.save_pretrained(place / "again", max_shard_size="20KB")
                        again = KINDS[name].from_pretrained(place / "again", dtype=dtype).eval()
                        equal(reference.run(again), wanted, what)
        assert facts["auto torch.float32"]["meta"] > 0, facts
        return facts

    return check


def saved_over(folder):
    reference, saved = Reference(MODELS["llama"], torch.float32, folder), folder / "saved"
    reference.make().save_pretrained(saved, max_shard_size="20KB")
    for prefetch in PREFETCHES:
        with prefetching(prefetch):
            model = transformers.LlamaForCausalLM.from_pretrained(
                saved, device_map={"": "disk"}, offload_folder=folder / "offload"
            )
            reference.check(model, "before")
            model.save_pretrained(saved, max_shard_size="20KB")
            reference.check(model, "after")
            reference.check(transformers.LlamaForCausalLM.from_pretrained(saved), "read again")
    return {"outputs": digest(reference.results)}


def _as_whole(reference, model, wanted, state, what):
    equal(reference.run(model), wanted, what)
    whole = get_state_dict_offloaded_model(model)
    assert whole.keys() == state.keys(), (what, whole.keys() ^ state.keys())
    assert all(same(tensor, state[name]) for name, tensor in whole.items()), what
    places = getattr(model, "hf_device_map", None)
    return {
        "outputs": digest(reference.run(model)),
        "map": places and {name: str(place) for name, place in places.items()},
        "meta": sum(parameter.is_meta for _, parameter in model.named_parameters(remove_duplicate=False)),
    }


def _adapters(reference, folder):
    """Save a base model and an adapter of it; go to their folder, because PEFT writes below the working directory."""
    os.chdir(folder)
    for base in ("base", "models--base"):  # PEFT writes next to the second and over the first, if the path is relative
        reference.make().save_pretrained(folder / base, max_shard_size="20KB")
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(reference.make(), config).save_pretrained(folder / "lora")
    return folder


def _lives(reference, model):
    def results(what):
        return what, reference.run(model)

    yield results("adapted")
    model.merge_adapter()
    yield results("merged")
    model.unmerge_adapter()
    yield results("unmerged")
    model = model.merge_and_unload()
    yield results("unloaded")


def _same_life(reference, offloaded, whole, what):
    facts = []
    for (stage, mine), (_, other) in zip(
        _lives(reference, offloaded.eval()), _lives(reference, whole.eval()), strict=True
    ):
        equal(mine, other, (what, stage))
        facts.extend(mine)
    return digest(facts)


def _with_prefix(device_map):
    return {f"base_model.model.{name}" if name else "": place for name, place in device_map.items()}


def adapter_on_offloaded(folder):
    """`PeftModel.from_pretrained` of a model that transformers has offloaded; from full and relative paths."""
    reference, facts = Reference(MODELS["llama"], torch.float32, folder), {}
    folder = _adapters(reference, folder)
    maps = {"disk": {"": "disk"}, "mixed": MIXED["llama"]}
    whole = {name: PeftModel.from_pretrained(reference.make(), folder / "lora") for name in ("disk", "mixed", "auto")}
    for number, (way, device_map) in enumerate(maps.items()):
        with prefetching(PREFETCHES[number]):
            base = transformers.LlamaForCausalLM.from_pretrained(
                folder / "base", device_map=device_map, offload_folder=folder / f"{way}1"
            )
            model = PeftModel.from_pretrained(
                base, folder / "lora", device_map=_with_prefix(device_map), offload_folder=folder / f"{way}2"
            )
            facts[way] = _same_life(reference, model, whole[way], way)
    # The map of the adapted model may be computed; its weights on the CPU must have been there.
    with prefetching(PREFETCHES[3]):
        base = transformers.LlamaForCausalLM.from_pretrained(
            Path("models--base"), device_map=MIXED["llama"], offload_folder=folder / "auto1"
        )
        options = {"device_map": "auto", "max_memory": {"cpu": 20_000}, "offload_folder": folder / "auto2"}
        model = PeftModel.from_pretrained(base, folder / "lora", **options)
        facts["auto map"] = {name: str(place) for name, place in model.hf_device_map.items()}
        facts["auto"] = _same_life(reference, model, whole["auto"], "auto")
    return facts


def adapter_on_checkpoint(folder):
    """An adapter on what `load_checkpoint_and_dispatch` made of safetensors. (The peer writes .dat files, which PEFT cannot use.)"""
    reference, facts = Reference(MODELS["llama"], torch.float32, folder), {}
    folder = _adapters(reference, folder)
    for way, device_map in {"disk": {"": "disk"}, "mixed": MIXED["llama"]}.items():
        with init_empty_weights():
            base = MODELS["llama"].make()
        load_checkpoint_and_dispatch(base, folder / "models--base", device_map, offload_folder=folder / f"{way}1")
        model = PeftModel.from_pretrained(
            base, folder / "lora", device_map=_with_prefix(device_map), offload_folder=folder / f"{way}2"
        )
        whole = PeftModel.from_pretrained(reference.make(), folder / "lora")
        facts[way] = _same_life(reference, model, whole, way)
    return facts


def pipeline_offload(way):
    """Return the check of one of the ways of diffusers to offload a pipeline, on the CPU; twice in turn, and back."""
    ways = {
        "model": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
        "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
    }

    def check(folder):
        wanted = image(pipeline())
        for prefetch in PREFETCHES:
            with prefetching(prefetch):
                pipe = pipeline()
                for _ in range(2):
                    ways[way](pipe)
                    for _ in range(2):
                        assert same(image(pipe), wanted)
                pipe.remove_all_hooks()
                assert not any("_hf_hook" in m.__dict__ for model in _models(pipe) for m in model.modules())
                assert same(image(pipe), wanted)
        return {"image": digest([wanted])}

    return check


def _models(pipe):
    return [pipe.unet, pipe.vae, pipe.text_encoder]


def pipeline_from_disk(folder):
    wanted, pipe = image(pipeline()), pipeline()
    pipe.save_pretrained(folder / "pipe")
    balanced = StableDiffusionPipeline.from_pretrained(folder / "pipe", device_map="balanced")
    balanced.set_progress_bar_config(disable=True)
    assert same(image(balanced), wanted)
    reference = Reference(MODELS["unet"], torch.float32, folder / "unet")
    maps = {
        "disk": {"device_map": {"": "disk"}}, "mixed": {"device_map": MIXED["unet"]},
        "auto": {"device_map": "auto", "max_memory": {"cpu": 40_000}},
    }  # fmt: skip
    facts = {"balanced": digest([image(balanced)])}
    for way, options in maps.items():
        unet = UNet2DConditionModel.from_pretrained(
            folder / "pipe" / "unet", offload_folder=folder / way, low_cpu_mem_usage=True, **options
        )
        facts[way] = _as_whole(reference, unet, reference.results, reference.state, way)
        pipe.unet = unet
        assert same(image(pipe), wanted), way
    vae = AutoencoderKL.from_pretrained(
        folder / "pipe" / "vae", device_map={"": "disk"}, offload_folder=folder / "vae"
    )
    pipe.vae = vae
    assert same(image(pipe), wanted)
    return facts


def sentence_encoder(folder):
    transformers.set_seed(0)
    transformers.BertModel(bert_config()).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")
    texts = [*sentences(6), "cat", sentences(1)[0] * 2]
    wanted = SentenceTransformer(str(folder / "bert"), device="cpu").encode(
        texts, batch_size=3, convert_to_tensor=True
    )
    for device_map in ({"": "disk"}, {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}):
        options = {"device_map": device_map, "offload_folder": str(folder / "offload")}
        model = SentenceTransformer(str(folder / "bert"), device="cpu", model_kwargs=options)
        assert any(parameter.is_meta for parameter in model.parameters())
        for _ in range(2):
            assert same(model.encode(texts, batch_size=3, convert_to_tensor=True), wanted), device_map
    return {"embeddings": digest([wanted])}


QUICK = {
    **big_hooks.CHECKS, "transformers-t5": from_pretrained("t5"), "peft-on-offloaded": adapter_on_offloaded,
    "diffusers-model": pipeline_offload("model"), "diffusers-from-disk": pipeline_from_disk,
    "sentence-transformers": sentence_encoder,
}  # fmt: skip
CHECKS = {
    **QUICK, **{f"transformers-{name}": from_pretrained(name) for name in KINDS},
    "transformers-saved-over": saved_over, "peft-on-checkpoint": adapter_on_checkpoint,
    **{f"diffusers-{way}": pipeline_offload(way) for way in ("model", "sequential")},
}  # fmt: skip
if __name__ == "__main__":
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    run(CHECKS, QUICK)
