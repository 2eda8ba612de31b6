"""The decoder of Qwen3-TTS's 12 Hz tokenizer: causal throughout, so it streams without delay.

Owns a decoder-only module with the names of the published checkpoints, and its streaming rules:
codebooks split in one for meaning and the others for sound, a transformer with a window, and
upsampling by transposed convolutions whose overlap with later frames is cut at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert, describe_mismatch
from triptych.modalities.tts.engine.codecs.builder import Rules, Walk, build
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.layers import (
    StreamingConv1d,
    StreamingConvTranspose1d,
    StreamingTransformer,
    window_mask,
)
from triptych.modalities.tts.engine.codecs.stages import (
    Chain,
    Pointwise,
    StreamingStage,
    channels_last,
    residual,
)

MODEL_TYPE = "qwen3_tts_tokenizer_12hz"
_EPS = 1e-5  # the least use of a code


class DecoderFields(msgspec.Struct, frozen=True, kw_only=True):
    """`decoder_config` of the tokenizer's config.json."""

    codebook_size: int = 2048
    codebook_dim: int = 512
    latent_dim: int = 1024
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 8
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int | None = None
    attention_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int = 72
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    num_quantizers: int = 16
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)
    decoder_dim: int = 1536


class TokenizerFields(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer's config.json."""

    decoder_config: DecoderFields = DecoderFields()
    output_sample_rate: int = 24_000


def read_tokenizer_config(config: Mapping[str, Any]) -> TokenizerFields:
    """Check the configuration. Raises `WeightsError` that names the field."""
    try:
        fields = convert(dict(config), TokenizerFields)
    except msgspec.ValidationError as error:
        reason = describe_mismatch(error, config)
        raise WeightsError(f"The tokenizer's config.json is not usable: {reason}.") from None
    if fields.decoder_config.hidden_act != "silu":
        raise WeightsError("The tokenizer's config.json: hidden_act must be silu.")
    return fields


class Qwen3TtsDecoder(nn.Module):
    """The tokenizer without its encoder; `load_state_dict` takes the names of its checkpoints."""

    def __init__(self, fields: TokenizerFields) -> None:
        super().__init__()
        self.fields = fields
        self.decoder = _SoundDecoder(fields.decoder_config)

    def decode(self, codes_BQF: Tensor) -> Tensor:
        """Audio [B, S] of whole streams."""
        pcm_BS: Tensor = self.decoder(codes_BQF)
        return pcm_BS


class _SoundDecoder(nn.Module):
    def __init__(self, fields: DecoderFields) -> None:
        super().__init__()
        width, latent = fields.decoder_dim, fields.latent_dim
        self.quantizer = _SplitQuantizer(fields)
        self.pre_conv = _CausalConv(fields.codebook_dim, latent, 3)
        self.pre_transformer = _WindowTransformer(fields)
        self.upsample = nn.ModuleList(
            nn.ModuleList((_CausalTransposed(latent, latent, factor, factor), _ConvNext(latent)))
            for factor in fields.upsampling_ratios
        )
        blocks = [
            _UpsamplingBlock(width >> index, rate)
            for index, rate in enumerate(fields.upsample_rates)
        ]
        last = width >> len(blocks)
        self.decoder = nn.ModuleList(
            (_CausalConv(latent, width, 7), *blocks, _SnakeBeta(last), _CausalConv(last, 1, 7))
        )

    def forward(self, codes_BQF: Tensor) -> Tensor:
        x_BCT = self.pre_transformer(self.pre_conv(self.quantizer(codes_BQF)))
        for upsampling in self.upsample:
            assert isinstance(upsampling, nn.ModuleList)
            for stage in upsampling:
                x_BCT = stage(x_BCT)
        for stage in self.decoder:
            x_BCT = stage(x_BCT)
        return _clip(x_BCT)[:, 0]


def _clip(x_BCT: Tensor) -> Tensor:
    return x_BCT.clamp(-1, 1)


class _SplitQuantizer(nn.Module):
    def __init__(self, fields: DecoderFields) -> None:
        super().__init__()
        self.rvq_first = _QuantizerHalf(fields, 1)
        self.rvq_rest = _QuantizerHalf(fields, fields.num_quantizers - 1)

    def forward(self, codes_BQF: Tensor) -> Tensor:
        x_BCF: Tensor = self.rvq_first(codes_BQF[:, :1]) + self.rvq_rest(codes_BQF[:, 1:])
        return x_BCF


class _QuantizerHalf(nn.Module):
    def __init__(self, fields: DecoderFields, num_codebooks: int) -> None:
        super().__init__()
        inner = fields.codebook_dim // 2
        self.vq = nn.Module()
        self.vq.layers = nn.ModuleList(
            _SummedCodebook(fields.codebook_size, inner) for _ in range(num_codebooks)
        )
        self.output_proj = nn.Conv1d(inner, fields.codebook_dim, 1, bias=False)

    def forward(self, codes_BQF: Tensor) -> Tensor:
        layers: Any = self.vq.layers
        x_BFC = torch.stack([layer(codes_BQF[:, at]) for at, layer in enumerate(layers)]).sum(0)
        y_BCF: Tensor = self.output_proj(x_BFC.transpose(1, 2))
        return y_BCF


class _SummedCodebook(nn.Module):
    """A table stored as sums of vectors and how many were summed, as it was learned."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = nn.Module()
        self._codebook.cluster_usage = nn.Parameter(torch.ones(size))
        self._codebook.embedding_sum = nn.Parameter(torch.zeros(size, width))

    def forward(self, codes_BF: Tensor) -> Tensor:
        usage: Any = self._codebook.cluster_usage
        total: Any = self._codebook.embedding_sum
        x_BFC: Tensor = total[codes_BF] / usage[codes_BF].clamp(min=_EPS)[..., None]
        return x_BFC


class _CausalConv(nn.Module):
    def __init__(
        self, num_in: int, num_out: int, kernel: int, *, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(num_in, num_out, kernel, dilation=dilation, groups=groups)
        self.pad = (kernel - 1) * dilation

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.conv(functional.pad(x_BCT, (self.pad, 0)))
        return y_BCT


class _CausalTransposed(nn.Module):
    def __init__(self, num_in: int, num_out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(num_in, num_out, kernel, stride)
        self.cut = kernel - stride

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.conv(x_BCT)
        return y_BCT[..., : y_BCT.shape[-1] - self.cut]


class _ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = _CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def mix(self, x_BTC: Tensor) -> Tensor:
        """The part after the convolution, channels last."""
        hidden = functional.gelu(self.pwconv1(self.norm(x_BTC)))
        y_BTC: Tensor = self.gamma * self.pwconv2(hidden)
        return y_BTC

    def forward(self, x_BCT: Tensor) -> Tensor:
        return x_BCT + self.mix(self.dwconv(x_BCT).transpose(1, 2)).transpose(1, 2)


class _SnakeBeta(nn.Module):
    """x + sin(ax)^2 / b with a and b by channel, stored as logarithms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(width))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x_BCT: Tensor) -> Tensor:
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x_BCT + torch.sin(x_BCT * alpha).pow(2) / (beta + 1e-9)


class _SnakeBetaUnit(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.act1 = _SnakeBeta(width)
        self.conv1 = _CausalConv(width, width, 7, dilation=dilation)
        self.act2 = _SnakeBeta(width)
        self.conv2 = _CausalConv(width, width, 1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.conv2(self.act2(self.conv1(self.act1(x_BCT))))
        return x_BCT + y_BCT


class _UpsamplingBlock(nn.Module):
    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        units = [_SnakeBetaUnit(width // 2, dilation) for dilation in (1, 3, 9)]
        transposed = _CausalTransposed(width, width // 2, 2 * rate, rate)
        self.block = nn.ModuleList((_SnakeBeta(width), transposed, *units))

    def forward(self, x_BCT: Tensor) -> Tensor:
        for stage in self.block:
            x_BCT = stage(x_BCT)
        return x_BCT


class _RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTC: Tensor) -> Tensor:
        return functional.rms_norm(x_BTC, self.weight.shape, self.weight, self.eps)


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.scale * x_BTC


class _Attention(nn.Module):
    def __init__(self, fields: DecoderFields) -> None:
        super().__init__()
        width, bias = fields.hidden_size, fields.attention_bias
        self.head_dim = fields.head_dim or width // fields.num_attention_heads
        num_kv = fields.num_key_value_heads * self.head_dim
        num_q = fields.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(width, num_q, bias=bias)
        self.k_proj = nn.Linear(width, num_kv, bias=bias)
        self.v_proj = nn.Linear(width, num_kv, bias=bias)
        self.o_proj = nn.Linear(num_q, width, bias=bias)

    def forward(
        self, x_BTC: Tensor, mask: Tensor, cache: Any, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        shape = (*x_BTC.shape[:2], -1, self.head_dim)
        query, key, value = (
            project(x_BTC).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, *rotary), _rotate(key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value)
        y_BHTD = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        y_BTC: Tensor = self.o_proj(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTC


def _rotate(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x_BHTD * cos_BTD[:, None] + turned * sin_BTD[:, None]


class _Mlp(nn.Module):
    def __init__(self, fields: DecoderFields) -> None:
        super().__init__()
        width, inner = fields.hidden_size, fields.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return y_BTC


class _Layer(nn.Module):
    def __init__(self, fields: DecoderFields) -> None:
        super().__init__()
        width, eps = fields.hidden_size, fields.rms_norm_eps
        self.self_attn = _Attention(fields)
        self.mlp = _Mlp(fields)
        self.input_layernorm = _RmsNorm(width, eps)
        self.post_attention_layernorm = _RmsNorm(width, eps)
        self.self_attn_layer_scale = _Scale(width)
        self.mlp_layer_scale = _Scale(width)

    def forward(
        self,
        x_BTC: Tensor,
        mask: Tensor,
        cache: Any = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BTC), mask, cache, position_embeddings)
        x_BTC = x_BTC + self.self_attn_layer_scale(attended)
        y_BTC: Tensor = x_BTC + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x_BTC)))
        return y_BTC


class _WindowTransformer(nn.Module):
    def __init__(self, fields: DecoderFields) -> None:
        super().__init__()
        self.fields = fields
        width, latent = fields.hidden_size, fields.latent_dim
        self.input_proj = nn.Linear(latent, width)
        self.layers = nn.ModuleList(_Layer(fields) for _ in range(fields.num_hidden_layers))
        self.norm = _RmsNorm(width, fields.rms_norm_eps)
        self.output_proj = nn.Linear(width, latent)

    def rotary(self, x_BTC: Tensor, times_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions."""
        head_dim = self.fields.head_dim or (
            self.fields.hidden_size // self.fields.num_attention_heads
        )
        exponents = torch.arange(0, head_dim, 2, device=x_BTC.device).float() / head_dim
        angles = times_BT[..., None].float() * self.fields.rope_theta**-exponents
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x_BTC.dtype), angles.sin().to(x_BTC.dtype)

    def forward(self, x_BCT: Tensor) -> Tensor:
        x_BTC = self.input_proj(x_BCT.transpose(1, 2))
        times_1T = torch.arange(x_BTC.shape[1], device=x_BTC.device)[None]
        visible = window_mask(times_1T, times_1T, self.fields.sliding_window)
        mask = x_BTC.new_zeros(()).where(visible[:, None], -torch.inf)
        rotary = self.rotary(x_BTC, times_1T)
        for layer in self.layers:
            x_BTC = layer(x_BTC, mask, position_embeddings=rotary)
        y_BTC: Tensor = self.output_proj(self.norm(x_BTC))
        return y_BTC.transpose(1, 2)


def _convolution(walk: Walk) -> StreamingStage:
    assert isinstance(walk.module, _CausalConv)
    return StreamingConv1d(walk.module.conv, (walk.module.pad, 0))


def _transposed(walk: Walk) -> StreamingStage:
    assert isinstance(walk.module, _CausalTransposed)
    return StreamingConvTranspose1d(walk.module.conv, (0, walk.module.cut))


def _conv_next(walk: Walk) -> StreamingStage:
    assert isinstance(walk.module, _ConvNext)
    return residual(walk.at("dwconv").stage(), channels_last([walk.module.mix]))


def _transformer(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    window = module.fields.sliding_window
    return Chain(
        channels_last([module.input_proj]),
        StreamingTransformer(module.layers, module.rotary, window),
        channels_last([module.norm, module.output_proj]),
    )


RULES: Rules = MappingProxyType(
    {
        "_CausalConv": _convolution,
        "_CausalTransposed": _transposed,
        "_ConvNext": _conv_next,
        "_SoundDecoder": lambda walk: walk.chain(
            "pre_conv", "pre_transformer", "upsample", "decoder"
        ),
        "_SnakeBetaUnit": lambda walk: residual(walk.chain("act1", "conv1", "act2", "conv2")),
        "_SnakeBeta": lambda walk: Pointwise(walk.module),
        "_WindowTransformer": _transformer,
        "_UpsamplingBlock": lambda walk: walk.at("block").stage(),
    }
)


def qwen3_tts(model: Qwen3TtsDecoder) -> Adapter:
    """The adapter of `Qwen3TtsDecoder`: codes [B, Q, F]."""
    fields = model.fields.decoder_config
    return Adapter(
        stage=Chain(build(model.decoder, RULES, path="decoder"), Pointwise(_clip)),
        embed=model.decoder.quantizer,
        one_shot=model.decode,
        sample_rate=model.fields.output_sample_rate,
        num_codebooks=fields.num_quantizers,
        codebook_size=fields.codebook_size,
        weight=model.decoder.pre_conv.conv.weight,
    )
