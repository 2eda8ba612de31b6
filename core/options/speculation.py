"""Options of speculative decoding.

Owns the declarations; `schedulers.tokens.prompt_lookup` and `draft_model` act on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triptych.core.options.declaration import COUNT, SHARE, Range, Role, option

NGRAM, STANDALONE, EAGLE3, DFLASH = "ngram", "standalone", "eagle3", "dflash"
MTP, NEXTN = "mtp", "nextn"
"""Two names of one algorithm."""
HAVE_FILES = (STANDALONE, EAGLE3, DFLASH)
"""The algorithms whose model or head has files of its own."""
MAX_DRAFTS = 31
"""Of all rows of a step together: more cost about as much as steps of their own."""
TYPICAL, GREEDY, RESIDUAL = "typical-acceptance", "greedy", "residual"
_GENERATED: tuple[Role, ...] = ("chat", "vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Several tokens of an answer in one step, without changing any."""

    ROLES: ClassVar[tuple[Role, ...]] = _GENERATED

    speculative_algorithm: str = option(
        "none",
        "Draft the next tokens of an answer, and verify them in one step. `ngram`: drafts are what"
        " followed the same tokens before, in the prompt or the answer; for edits and summaries."
        " `standalone`: a smaller model of the same vocabulary drafts (--draft-model-path)."
        " `eagle3` and `dflash`: a head made for the model drafts from its hidden states, too."
        " `mtp` or `nextn`: so does the layer that predicts further tokens, in the model's own"
        " files.",
        choices=("none", NGRAM, STANDALONE, EAGLE3, DFLASH, MTP, NEXTN),
        aliases=("--speculative-method",),
        roles=_GENERATED,
    )
    num_speculative_tokens: int = option(
        7,
        "Most tokens of a draft; its length follows from the time that drafts save.",
        aliases=("--speculative-num-draft-tokens", "--speculative-num-steps", "--spec-tokens"),
        within=Range(low=1, high=MAX_DRAFTS),
        roles=_GENERATED,
    )
    draft_model_path: str = option(
        "",
        "Model or head that drafts with --speculative-algorithm standalone, eagle3 or dflash: a"
        " folder, hub id, GGUF file or package; of the same vocabulary, or a head for the model.",
        aliases=(
            "--speculative-draft-model-path",
            "--speculative-draft-model",
            "--draft-model",
            "--model-draft",
            "--spec-model",
            "-md",
        ),
        roles=_GENERATED,
    )
    speculative_ngram_min_match_window_size: int = option(
        1,
        "Fewest last tokens that a draft's place in the text has to match.",
        within=COUNT,
        roles=_GENERATED,
    )
    speculative_ngram_max_match_window_size: int = option(
        12,
        "Last tokens that are compared to choose among several places.",
        within=COUNT,
        roles=_GENERATED,
    )
    rejection_sampling_strategy: str = option(
        TYPICAL,
        "Which drafts count. All choices name the exact rule: the model samples each position, with"
        " temperature 0 the likeliest token, and a draft counts where it is that token. `residual`"
        " does so for ngram alone, whose drafts have no probabilities of their own.",
        choices=(TYPICAL, GREEDY, RESIDUAL),
        roles=_GENERATED,
    )
    use_relaxed_acceptance_for_thinking: bool = option(
        False,
        "While a model reasons (<think>), let a draft count if it is among the likeliest tokens."
        " This changes answers, and they are not reproducible.",
        roles=_GENERATED,
    )
    relaxed_topk: int = option(
        10,
        "The number of likeliest tokens that --use-relaxed-acceptance-for-thinking lets count.",
        within=COUNT,
        roles=_GENERATED,
    )
    relaxed_delta: float = option(
        0.6,
        "How far the probability of such a token may be below that of the likeliest one.",
        within=Range(low=0, high=1),
        roles=_GENERATED,
    )
    speculative_accept_threshold_single: float = option(
        1.0,
        "Probability above which a draft counts, whatever was sampled, of requests with a"
        " temperature. Below 1 this changes answers, and they are not reproducible.",
        within=Range(low=0, high=1),
        roles=_GENERATED,
    )
    speculative_accept_threshold_acc: float = option(
        1.0,
        "A draft with the probability p counts with p divided by this, of requests with a"
        " temperature. Below 1 this changes answers, and they are not reproducible.",
        within=SHARE,
        roles=_GENERATED,
    )
