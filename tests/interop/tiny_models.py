"""Tiny random models of transformers and diffusers, with inputs of several lengths: nothing is downloaded."""

import torch
import transformers
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from offload_samples import Sample

WORDS, WIDTH, LENGTHS = 32, 16, (5, 11, 5, 8)
DECODER = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}


def seeded(make):
    def build():
        torch.manual_seed(0)
        return make().eval()

    return build


def token_ids(length, rows=2):
    """Return token ids of shape (rows, length), none of them special."""
    return torch.arange(rows * length).reshape(rows, length) * 7 % (WORDS - 3) + 3


def llama():
    """A decoder with a rotary buffer that no state dict holds."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def tied_llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, tie_word_embeddings=True))


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    )


def t5():
    sizes = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **sizes, decoder_start_token_id=0, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True
        )
    )


def bert():
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes))


def unet():
    return UNet2DConditionModel(
        block_out_channels=(8, WIDTH), layers_per_block=1, sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip


def vae():
    return AutoencoderKL(
        block_out_channels=(8, WIDTH), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, sample_size=16,
    )  # fmt: skip


def text_encoder():
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(vocab_size=WORDS, max_position_embeddings=8, **sizes, **special)
    )


def pipeline():
    vocabulary = ["<|startoftext|>", "<|endoftext|>", "a</w>", "cat</w>", "c", "a", "t</w>", "at</w>"]
    ids = {word: number for number, word in enumerate(vocabulary)}
    pipe = StableDiffusionPipeline(
        vae=seeded(vae)(), text_encoder=seeded(text_encoder)(),
        tokenizer=transformers.CLIPTokenizer(vocab=ids, merges=[("a", "t</w>"), ("c", "at</w>")], model_max_length=8),
        unet=seeded(unet)(), scheduler=DDIMScheduler(steps_offset=1, clip_sample=False), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe, words="a cat"):
    """Return the image of two steps, of shape (1, 3, 16, 16), from the same noise each time."""
    noise = torch.Generator().manual_seed(0)
    return pipe(words, num_inference_steps=2, height=16, width=16, output_type="pt", generator=noise).images


def _causal(dtype):
    return [{"input_ids": token_ids(length), "use_cache": False} for length in LENGTHS]


def _masked(dtype):
    masks = [torch.ones(2, length, dtype=torch.long).tril(2) for length in LENGTHS]
    return [{"input_ids": token_ids(mask.shape[1]), "attention_mask": mask} for mask in masks]


def _translated(dtype):
    return [
        {"input_ids": token_ids(length), "decoder_input_ids": token_ids(length - 2), "use_cache": False}
        for length in LENGTHS
    ]


def _denoised(dtype):
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "sample": torch.randn(1, 4, 8, 8, generator=draw).to(dtype),
            "timestep": torch.tensor(10 * length),
            "encoder_hidden_states": torch.randn(1, length, WIDTH, generator=draw).to(dtype),
        }
        for length in LENGTHS
    ]


_PROMPT = {"input_ids": token_ids(7, 1), "attention_mask": torch.ones(1, 7, dtype=torch.long), **GREEDY}
MODELS = {
    "llama": Sample(seeded(llama), _causal, _PROMPT), "tied_llama": Sample(seeded(tied_llama), _causal, _PROMPT),
    "mixtral": Sample(seeded(mixtral), _causal, _PROMPT), "t5": Sample(seeded(t5), _translated, _PROMPT),
    "bert": Sample(seeded(bert), _masked), "unet": Sample(seeded(unet), _denoised),
}  # fmt: skip
