"""Tiny tokenizers and text encoders of transformers with random weights."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from support.tiny_autoencoders import randomized

WIDTH = 16
_SPECIAL = ["<pad>", "<s>", "</s>"]


def tokenizer(length: int, *, is_bare: bool = False) -> Any:
    """A token per byte, between a beginning and an end unless it is bare."""
    alphabet = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if not is_bare:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=length,
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    )


_SIZES = {
    "vocab_size": 300,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_KV = {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}


def clip(*, projects: bool, length: int = 77) -> nn.Module:
    config = transformers.CLIPTextConfig(
        **_SIZES, projection_dim=12, max_position_embeddings=length, eos_token_id=2, bos_token_id=1
    )
    kind = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
    return randomized(kind(config))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=300, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2
    )
    return randomized(transformers.T5EncoderModel(config))


def gemma() -> nn.Module:
    return randomized(transformers.Gemma2Model(transformers.Gemma2Config(**_SIZES, **_KV)))


def qwen(num_layers: int = 2) -> nn.Module:
    sizes = {**_SIZES, **_KV, "num_hidden_layers": num_layers}
    return randomized(transformers.Qwen3Model(transformers.Qwen3Config(**sizes)))


def mistral() -> nn.Module:
    """Mistral 3 as FLUX.2 has it: a language model of 30 layers and a vision tower."""
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **_SIZES, **_KV, "num_hidden_layers": 30},
        vision_config={"model_type": "pixtral", **vision},
    )
    return randomized(transformers.Mistral3ForConditionalGeneration(config))


_VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def seeing() -> dict[str, Any]:
    """Qwen2.5-VL as Qwen-Image-Edit has it, and what prepares images for it."""
    words = tokenizer(2000)
    words.add_special_tokens({"additional_special_tokens": list(_VISION)})
    start, image, end, video = words.convert_tokens_to_ids(list(_VISION))
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **_SIZES,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return {
        "tokenizer": words,
        "processor": transformers.Qwen2VLImageProcessorPil(),
        "text_encoder": randomized(transformers.Qwen2_5_VLForConditionalGeneration(config)),
    }


def seeing3() -> dict[str, Any]:
    """Qwen3-VL as Qwen-Image 2.1 has it, and what prepares words and images for it."""
    words = tokenizer(2000, is_bare=True)
    words.add_special_tokens({"additional_special_tokens": list(_VISION)})
    start, image, end, video = words.convert_tokens_to_ids(list(_VISION))
    config = transformers.Qwen3VLConfig(
        text_config={
            **_SIZES,
            **_KV,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return {
        "tokenizer": words,
        "processor": transformers.Qwen2VLImageProcessorPil(
            patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        "text_encoder": randomized(transformers.Qwen3VLForConditionalGeneration(config)),
    }


class PilProcessor(transformers.Qwen2_5_VLProcessor):
    """Theirs, without videos, for which it would need torchvision."""

    chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}<|im_end|>\n"
        "{% endfor %}"
    )

    def __init__(self, image_processor: Any, words: Any) -> None:
        self.image_processor, self.tokenizer, self.video_processor = image_processor, words, None
        self.image_token, self.video_token = _VISION[1], _VISION[3]
        self.image_token_id, self.video_token_id = words.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )


def writing() -> dict[str, Any]:
    """GLM-Image's language model of image tokens, and what lays out its prompts."""
    names = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(4000, is_bare=True)._tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        extra_special_tokens=names,
    )
    template = (
        "{% for m in messages %}user: {% for c in m.content %}"
        "{% if c.type == 'image' %}<|image|>{% else %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    config = transformers.GlmImageConfig(
        text_config={
            **_SIZES,
            "num_key_value_heads": 1,
            "vision_vocab_size": 20,
            "eos_token_id": 299,  # never written
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "image_size": 64,
        },
        vq_config={"embed_dim": 8, "num_embeddings": 20, "latent_channels": 16},
        image_token_id=words.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=1,
        image_end_token_id=298,
    )
    writer: Any = randomized(transformers.GlmImageForConditionalGeneration(config))
    writer.lm_head.weight.data *= 60  # so that what is read decides what is written
    return {
        "processor": transformers.GlmImageProcessor(
            transformers.GlmImageImageProcessorPil(), words, chat_template=template
        ),
        "vision_language_encoder": writer,
    }


def llama() -> nn.Module:
    sizes = {**_SIZES, **_KV, "num_hidden_layers": 4, "attn_implementation": "eager"}
    return randomized(transformers.LlamaModel(transformers.LlamaConfig(**sizes)))
