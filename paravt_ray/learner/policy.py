"""The trained model as the learner sees it: micro-batch in, log-probs and entropies of its generated tokens out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paravt_ray.algorithm.logprobs import chunked_logprobs
from paravt_ray.learner.attention import use_packed_attention
from paravt_ray.learner.batching import MicroBatch


class Head(nn.Module):
    """The output layer, applied in chunks.

    A module of its own, so that ZeRO-3 gathers the output matrix once for all chunks; one gather a chunk would make
    ranks with different numbers of chunks wait for each other for ever.
    """

    def __init__(self, lm_head: nn.Linear, chunk_tokens: int) -> None:
        """`chunk_tokens` positions have full-vocabulary logits at one time."""
        super().__init__()
        self.lm_head = lm_head
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`hidden` [N, H], `targets` [N] to log-probs [N] and entropies [N], float32, of softmax(logits / T)."""
        return chunked_logprobs(hidden, self.lm_head.weight, targets, temperature, self.chunk_tokens)


class Policy(nn.Module):
    """Qwen3-VL with packed attention and a chunked head."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:
        """`model` is a `Qwen3VLForConditionalGeneration`."""
        super().__init__()
        use_packed_attention(model)
        self.model = model
        self.head = Head(model.lm_head, chunk_tokens)

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype, chunk_tokens: int) -> Policy:
        """Load a checkpoint directory. Never runs code from it, never asks the network."""
        from transformers import Qwen3VLForConditionalGeneration
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=dtype, local_files_only=True)
        return cls(model, chunk_tokens)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs [N] and entropies [N] of the generated tokens, float32, under softmax(logits / temperature)."""
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        visual = self.model.model.visual
        seen = visual(
            batch.pixel_values.to(visual.dtype),
            grid_thw=batch.frame_grid,
            cu_seqlens=batch.frame_families,
            max_seqlen=1,
        )
        # Each different frame was encoded once; here it is put wherever a sequence shows it. Where none does, the
        # index is empty and the gradient zero, but the tower still takes part in every rank's communication.
        image = BaseModelOutputWithDeepstackFeatures(
            pooler_output=(seen.pooler_output[batch.visual_index],),
            deepstack_features=[(features[batch.visual_index],) for features in seen.deepstack_features],
        )
        hidden = self.model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            mm_encoder_outputs={"image": image},
            use_cache=False,
            cu_seq_lens_q=batch.families,
        ).last_hidden_state
        logprobs, entropies = self.head(hidden[0, batch.sources], batch.targets, temperature)
        return logprobs, entropies
