"""The path of a GPU: on a machine without one, or on a device with `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.kernel_device import is_interpreted, kernel_device


def rehearse_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device for tensors from here on: the GPU, or else the host.

    There, tensors say that they are on a GPU, and operators run interpreted kernels. In float32:
    the interpreter cannot multiply matrices of bfloat16.
    """
    if is_interpreted():
        _interpret(monkeypatch)
    return kernel_device()


def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.core.runtime.kernels.triton import (
        adaln,
        add_rms_norm,
        altup,
        cache_metrics,
        delta_rule,
        fp8_linear,
        gated,
        gated_norm,
        gelu_rows,
        gguf_linear,
        gptq_linear,
        head_linear,
        key_index,
        latent_decode,
        latent_prefill,
        latent_write,
        linear,
        lora,
        moe,
        norm_rotary,
        paged_decode,
        paged_prefill,
        penalties,
        rope_write,
        routing,
        row_moments,
        sampling,
        selective_scan,
        short_conv,
        stream_conv,
    )

    launches: list[tuple[Any, str, Any]] = [
        (adaln, "modulated_norm", adaln.launch_modulated_norm),
        (adaln, "gated_modulated_norm", adaln.launch_gated_modulated_norm),
        (add_rms_norm, "rms_norm", add_rms_norm.launch_rms_norm),
        (add_rms_norm, "add_rms_norm", add_rms_norm.launch_add_rms_norm),
        (altup, "predict_streams", altup.launch_predict),
        (altup, "correct_streams", altup.launch_correct),
        (row_moments, "as_large_as", row_moments.launch_as_large_as),
        (row_moments, "relu_above", row_moments.launch_relu_above),
        (cache_metrics, "relative_distances", cache_metrics.launch_distances),
        (cache_metrics, "weighted_cells", cache_metrics.launch_weighted),
        (delta_rule, "delta_rule", delta_rule.launch),
        (fp8_linear, "fp8_linear", fp8_linear.launch_fp8_linear),
        (gated, "gated", gated.launch),
        (gated_norm, "gated_norm", gated_norm.launch),
        (gelu_rows, "quantize_gelu_rows", gelu_rows.launch),
        (gguf_linear, "gguf_linear", gguf_linear.launch_gguf_linear),
        (gptq_linear, "gptq_linear", gptq_linear.launch_gptq_linear),
        (head_linear, "head_linear", head_linear.launch),
        (key_index, "score_keys", key_index.launch_scores),
        (key_index, "choose_slots", key_index.launch_choice),
        (latent_decode, "latent_decode", latent_decode.launch),
        (latent_prefill, "latent_prefill", latent_prefill.launch),
        (latent_write, "latent_write", latent_write.launch),
        (linear, "linear", linear.launch_linear),
        (lora, "lora_add", lora.launch_lora_add),
        (moe, "moe_mlp", moe.launch_moe_mlp),
        (moe, "packed_moe_mlp", moe.launch_packed_moe_mlp),
        (norm_rotary, "norm_rotary", norm_rotary.launch),
        (paged_decode, "paged_decode", paged_decode.launch_paged_decode),
        (paged_prefill, "paged_prefill", paged_prefill.launch_paged_prefill),
        (penalties, "penalized", penalties.launch),
        (rope_write, "rope_write", rope_write.launch),
        (routing, "route", routing.launch_route),
        (sampling, "sample_rows", sampling.launch),
        (selective_scan, "selective_scan", selective_scan.launch),
        (short_conv, "short_conv", short_conv.launch),
        (stream_conv, "stream_conv", stream_conv.launch),
    ]
    for module, operator, launch in launches:
        monkeypatch.setattr(module, operator, launch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
