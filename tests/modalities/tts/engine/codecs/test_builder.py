"""What cannot stream is refused by name; what streams wrongly is refused when built."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from torch import nn

from support.codec_models import encodec, random_model, randomize
from triptych.core.errors import WeightsError
from triptych.modalities.tts.engine.codecs import build_decoder
from triptych.modalities.tts.engine.codecs.builder import build
from triptych.modalities.tts.engine.codecs.families import dac as dac_family
from triptych.modalities.tts.engine.codecs.stages import SignalRate, StreamingStage, Sum

NO_RULES = MappingProxyType({})


def refusal(module: nn.Module) -> str:
    with pytest.raises(WeightsError) as caught:
        build(module, NO_RULES, path="decoder")
    return caught.value.message


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.GroupNorm(1, 4), "normalizes over the whole utterance"),
        (nn.InstanceNorm1d(4), "normalizes over the whole utterance"),
        (nn.LSTM(4, 4, bidirectional=True), "runs backwards"),
        (nn.GRU(4, 4), "no known streaming twin"),
        (nn.MaxPool1d(2), "no known streaming twin"),
        (nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), "circular"),
        (nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect"), "reflects at the end"),
        (nn.Conv1d(4, 4, 3, padding=5), "exceed the kernel"),
    ],
)
def test_a_module_without_a_streaming_twin_is_named(module: nn.Module, reason: str) -> None:
    tree = nn.Sequential(nn.ELU(), nn.ModuleList([nn.Conv1d(4, 4, 1), module]))
    message = refusal(tree)
    assert message.startswith(f"decoder.1.1 ({type(module).__name__}): ")
    assert reason in message


def test_encodec_with_time_wise_norms_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match=r"decoder\.layers\.0\.norm \(GroupNorm\)"):
        build_decoder(encodec(norm_type="time_group_norm"), num_rows=1)


def test_an_unknown_model_class_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WeightsError, match=r"No streaming decoder for Linear.*MimiModel"):
        build_decoder(nn.Linear(2, 2), num_rows=1)


def test_a_transformer_layer_with_a_past_of_its_own_is_named() -> None:
    model = random_model("mimi")
    layer = model.decoder_transformer.layers[1]
    layer.mlp = nn.Sequential(nn.Conv1d(16, 16, 3), layer.mlp)
    with pytest.raises(WeightsError, match=r"decoder_transformer\.layers\.1\.mlp\.0 \(Conv1d\)"):
        build_decoder(model, num_rows=1)


def test_a_wrong_rule_is_found_out_when_the_decoder_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_skip = {
        "DacResidualUnit": lambda walk: walk.chain("snake1", "conv1", "snake2", "conv2")
    }
    monkeypatch.setattr(dac_family, "RULES", {**dac_family.RULES, **without_skip})
    with pytest.raises(WeightsError, match="differs from the codec's own decoder"):
        build_decoder(random_model("dac"), num_rows=1)


def test_a_model_of_another_length_is_found_out_when_built(monkeypatch: pytest.MonkeyPatch) -> None:
    without_last = {"DacDecoder": lambda walk: walk.chain("conv1", "block", "snake1")}
    monkeypatch.setattr(dac_family, "RULES", {**dac_family.RULES, **without_last})
    model = random_model("dac")
    model.decoder.conv2 = nn.Conv1d(4, 1, 7, padding=1).double()
    with pytest.raises(WeightsError, match="samples, but the codec's own decoder gives"):
        build_decoder(model, num_rows=1)


def test_branches_of_different_length_cannot_be_added() -> None:
    branches = [build(nn.Conv1d(4, 4, 3, padding=p), NO_RULES, path="x") for p in (0, 1)]
    with pytest.raises(WeightsError, match="different length"):
        Sum(*branches).bind(SignalRate())


def test_a_stride_must_divide_the_rate() -> None:
    stage: StreamingStage = build(nn.Conv1d(4, 4, 3, stride=2), NO_RULES, path="x")
    with pytest.raises(WeightsError, match="Stride 2 does not divide 3"):
        stage.bind(SignalRate(rate=3))


def test_weight_norms_are_folded_away() -> None:
    model = encodec()
    randomize(model)
    build_decoder(model, num_rows=1)
    assert not any("parametrizations" in key for key in model.state_dict())


def test_a_decoder_that_gives_nan_is_refused() -> None:
    model = random_model("dac", torch.float32)
    with torch.no_grad():
        model.decoder.conv2.bias.fill_(torch.nan)
    with pytest.raises(WeightsError, match="differs"):
        build_decoder(model, num_rows=1)
