"""The names that families give to the tensors of their mixtures of experts.

Owns the table. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from triptych.core.runtime.layers.moe import MoeConfig
from triptych.core.runtime.tensors.stacked import ALTERNATING, StackedNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names in a layer: of its MLP, which may be a mixture (`module`), and of a mixture's parts.

    `gate`, `up` and `down` are projections of each expert, which has a number below
    `module`.experts; checkpoints with `stacked` tensors are split to have them (see
    `core.runtime.tensors.stacked`). The correction may be a matrix of one row. The projections of
    the shared expert have the usual names, or `shared_gate_up` and `shared_down` where gate and up
    are stored as one tensor.
    """

    module: str = "mlp"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    has_correction_row: bool = False
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    shared_gate_up: str = ""
    shared_down: str = "down_proj"
    stacked: StackedNames | None = None


EXPERT_NAMES: Mapping[str, ExpertNames] = MappingProxyType(
    {
        "": ExpertNames(),
        "mixtral": ExpertNames(
            module="block_sparse_moe",
            router="block_sparse_moe.gate",
            gate="w1",
            up="w3",
            down="w2",
        ),
        "minimax": ExpertNames(
            module="block_sparse_moe",
            router="block_sparse_moe.gate",
            correction="block_sparse_moe.e_score_correction_bias",
            gate="w1",
            up="w3",
            down="w2",
        ),
        "kimi_linear": ExpertNames(
            module="block_sparse_moe",
            router="block_sparse_moe.gate",
            correction="block_sparse_moe.gate.e_score_correction_bias",
            gate="w1",
            up="w3",
            down="w2",
            shared="block_sparse_moe.shared_experts",
        ),
        "qwen2": ExpertNames(shared="mlp.shared_expert"),
        "qwen3_next": ExpertNames(
            shared="mlp.shared_expert", stacked=StackedNames(is_transposed=False)
        ),
        "mistral4": ExpertNames(stacked=StackedNames(is_transposed=False)),
        "lfm2": ExpertNames(
            module="feed_forward",
            router="feed_forward.gate",
            correction="feed_forward.expert_bias",
            gate="w1",
            up="w3",
            down="w2",
        ),
        "exaone": ExpertNames(correction="mlp.e_score_correction_bias"),
        "ernie": ExpertNames(
            correction="mlp.moe_statics.e_score_correction_bias", has_correction_row=True
        ),
        "hunyuan": ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp"),
        "gpt-oss": ExpertNames(router="mlp.router", stacked=ALTERNATING),
        "granite": ExpertNames(
            module="block_sparse_moe",
            router="block_sparse_moe.router.layer",
            shared="shared_mlp",
            shared_gate_up="input_linear",
            shared_down="output_linear",
            stacked=StackedNames(
                gate_up="input_linear.weight", down="output_linear.weight", is_transposed=False
            ),
        ),
        "nemotron_h": ExpertNames(
            module="mixer",
            router="mixer.gate",
            correction="mixer.gate.e_score_correction_bias",
            shared="mixer.shared_experts",
        ),
        "llama4": ExpertNames(
            module="feed_forward",
            router="feed_forward.router",
            shared="feed_forward.shared_expert",
            stacked=StackedNames(),
        ),
    }
)
"""By the `naming` of a `MoeConfig`; the first is that of most families."""


def names_of(moe: MoeConfig | None) -> ExpertNames:
    """The names of a family; those of most where there are no experts."""
    return EXPERT_NAMES["" if moe is None else moe.naming]
