"""The tiny Qwen3-VL: the real architecture at two million parameters, with a tokenizer for the synthetic task.

It loads in transformers and in vLLM as any Qwen3-VL does. One frame of 32x32 pixels is one visual token.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
"""Qwen3's control tokens, in its order."""
PLAIN_ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""Qwen3's added tokens that decoding keeps in the text. `<answer>` is not one of them."""

VOCABULARY = 1536
"""Most entries that the tokenizer may have; few texts give fewer."""
PIECES = (
    r"\p{N} to \p{N}+ s|\p{N}\.\p{N} seconds>|\p{N}{1,2}(?=\p{N}(?!\p{N}))|\p{N}"
    r"|\[| ?\p{L}+| ?[^\s\p{L}\p{N}\[]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is split before pairs are merged: what a large model's early layers put together comes in one piece.

A number's last digit stands apart from those before it, and takes along what follows it in a window or in the time of a
frame: `13` + `0 to 140 s`, `<` + `13` + `2.5 seconds>`. To read the report of a window, or to find the frames in it, is
then a single lookup of the same piece. Letters take no punctuation along, so that the `B` of an answer is the `B` of
its option, and a bracket stands alone, so that an answer begins alike whatever form it has."""
FRAME_SIDE = 32
CONTEXT_LENGTH = 4096

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif 'image' in part.type %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'video' in part.type %}<|vision_start|><|video_pad|><|vision_end|>
{%- endif %}{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Train a byte-level BPE on the texts, with Qwen's added tokens and pieces of our own (`PIECES`)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    backend.normalizer = normalizers.NFC()
    entries = VOCABULARY - len(SPECIAL_TOKENS) - len(PLAIN_ADDED_TOKENS)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=entries, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.decoder = decoders.ByteLevel()
    # Not of Qwen's tokenizer class, which would put its own split back when it is loaded.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED_TOKENS])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def tiny_config(tokenizer: Any) -> Any:
    """The configuration of the tiny model for a tokenizer."""
    from transformers import Qwen3VLConfig

    ids = tokenizer.get_added_vocab()
    # Input and output embeddings stay apart: vLLM's CPU engine leaves a tied head behind when weights are pushed.
    text = {
        "vocab_size": len(tokenizer) + -len(tokenizer) % 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        # Attention is most of what this model does: with half as many heads of half the size, and two layers more, the
        # loss on the text exercises was 0.51 after 300 steps of 16 instead of 0.24.
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.06,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def write_blank_model(out: Path, texts: Iterable[str], seed: int) -> Path:
    """Write an untrained checkpoint with the tokenizer of the texts; it loads in transformers and vLLM."""
    import torch
    from transformers import (
        GenerationConfig,
        Qwen2VLImageProcessor,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = train_tokenizer(texts)
    tokenizer.model_max_length = CONTEXT_LENGTH
    config = tiny_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    ids = tokenizer.get_added_vocab()
    model.generation_config = GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"], do_sample=False
    )
    model.save_pretrained(out)
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    colours = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    pixels = {"shortest_edge": FRAME_SIDE**2, "longest_edge": FRAME_SIDE**2}
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(size=pixels, **patches, **colours),
        tokenizer,
        # A video's limit holds for all its frames together; engines compute with it even where only images are sent.
        Qwen3VLVideoProcessor(size=pixels | {"longest_edge": 768 * FRAME_SIDE**2}, **patches, **colours),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out)
    return out
