"""Converts Kokoro's released weights, in either published form, to a safetensors folder of ours.

Owns the names: of each tensor in the hub's pickled state dicts, in a traced ONNX graph, and in our
modules. Folds weight normalization (and the affine half of instance norms) into the weights.
Fetches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.torch_file import read_torch_file
from triptych.core.weights.layout import SINGLE_NAME
from triptych.core.weights.onnx_graph import Node, OnnxGraph
from triptych.modalities.tts.configs.kokoro import MODEL_TYPE, VOICE_PREFIX

VOICE_SHAPE = (510, 1, 256)
_RENAMED = (
    (re.compile(r"^bert\.encoder\.albert_layer_groups\.0\.albert_layers\.0\."), "bert.layer."),
    (re.compile(r"^bert\.encoder\.embedding_hidden_mapping_in\."), "bert.mapping."),
    (re.compile(r"^predictor\.duration_proj\.linear_layer\."), "predictor.duration_proj."),
    (re.compile(r"^decoder\.asr_res\.0\."), "decoder.asr_res."),
    (re.compile(r"^(text_encoder\.cnn\.\d+\.1)\.gamma$"), r"\1.weight"),
    (re.compile(r"^(text_encoder\.cnn\.\d+\.1)\.beta$"), r"\1.bias"),
)
_UNUSED = re.compile(r"^bert\.(pooler\.|embeddings\.position_ids$)|\.stft\.")
_WEIGHTED = {"MatMul", "Conv", "ConvTranspose", "LSTM"}
_ONNX_GATES = (0, 2, 3, 1)
"""Indices of torch's input, forget, cell and output gates in ONNX's order i, o, f, c."""


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write the model and its voices into an existing `folder`."""
    whole = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / SINGLE_NAME, metadata={"format": "pt"})
    text = json.dumps({"model_type": MODEL_TYPE, **config}, ensure_ascii=False)
    (folder / "config.json").write_text(text, encoding="utf-8")


def hub_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a hub folder: one .pth of nested state dicts, and voices/*.pt."""
    tensors = canonical(_flatten(read_torch_file(hub_file(folder))))
    for file in sorted((folder / "voices").glob("*.pt")):
        table = read_torch_file(file)
        if not isinstance(table, Tensor):
            raise WeightsError(f"{file.name} holds no voice: a single tensor is expected.")
        tensors[VOICE_PREFIX + file.stem] = table
    return tensors


def hub_file(folder: Path) -> Path:
    """The single .pth file of a hub folder. Raises `WeightsError`."""
    files = sorted(folder.glob("*.pth"))
    if len(files) != 1:
        raise WeightsError(
            f"A Kokoro folder holds {SINGLE_NAME}, or one .pth file; found {len(files)} .pth files."
        )
    return files[0]


def convert_hub(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    """Convert a hub folder to our layout. Raises `WeightsError` for unfit files."""
    write_folder(target, hub_tensors(folder), config)


def convert_packages(
    onnx: Path, voices: Mapping[str, bytes], config: Mapping[str, Any], target: Path
) -> None:
    """Convert a traced graph and raw voice files to our layout. Raises `WeightsError`."""
    write_folder(target, onnx_tensors(onnx) | dict(voice_tables(voices.items())), config)


def onnx_tensors(file: Path) -> dict[str, Tensor]:
    """The same weights from a graph traced from the released model (weight norms folded).

    Named initializers keep their module's name; nameless ones are named after the node that uses
    them.
    """
    graph = OnnxGraph(file)
    tensors = {
        _module_path(name.split(".")): _tensor(graph.tensor(name))
        for name in graph.floats
        if name.startswith(("encoder.", "decoder."))
    }
    unnamed = {name for name in graph.floats if name.startswith(("onnx::", "/"))}
    for node in graph.nodes:
        if node.operator in _WEIGHTED and len(node.inputs) > 1 and node.inputs[1] in unnamed:
            tensors.update(_node_tensors(graph, node))
            unnamed.discard(node.inputs[1])  # later layers share it under their own paths
    return canonical(tensors)


def voice_tables(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, Tensor]]:
    """Tensor names and style tables of raw little-endian float32 voice files, by voice name."""
    size = 4 * int(np.prod(VOICE_SHAPE))
    for name, content in files:
        if len(content) != size:
            raise WeightsError(f"The voice {name!r} has {len(content)} bytes instead of {size}.")
        table = np.frombuffer(content, np.dtype("<f4")).reshape(VOICE_SHAPE)
        yield VOICE_PREFIX + name, _tensor(table)


def canonical(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename upstream tensors to our modules' names; fold norms and drop unused tensors."""
    kept = {name: tensor for name, tensor in tensors.items() if not _UNUSED.search(name)}
    folded = _fold_affine(_fold_weight_norm(kept))
    return {_module_name(name): tensor for name, tensor in folded.items()}


def _module_name(name: str) -> str:
    for pattern, ours in _RENAMED:
        name = pattern.sub(ours, name)
    return name


def _fold_weight_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute weight = g v / |v|, the norm over all but the first dimension (arXiv:1602.07868)."""
    for name in [name for name in tensors if name.endswith(".weight_g")]:
        stem = name.removesuffix("_g")
        if f"{stem}_v" not in tensors:
            raise WeightsError(f"Tensor {name!r} lacks its direction {stem}_v.")
        tensors[stem] = torch._weight_norm(tensors.pop(f"{stem}_v"), tensors.pop(name), 0)
    return tensors


def _fold_affine(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fold instance norms' own scale w and shift b into the following style projections.

    (1 + gamma) (w x + b) + beta is (1 + gamma') x + beta' with gamma' = w (1 + gamma) - 1 and beta'
    = beta + b (1 + gamma). Released weights have w = 1 and b = 0.
    """
    for name in [name for name in tensors if name.endswith(".norm.weight")]:
        stem = name.removesuffix("norm.weight")
        scale, shift = tensors.pop(name), tensors.pop(f"{stem}norm.bias")
        gamma_CY, beta_CY = tensors[f"{stem}fc.weight"].chunk(2)
        gamma_C, beta_C = tensors[f"{stem}fc.bias"].chunk(2)
        tensors[f"{stem}fc.weight"] = torch.cat(
            (scale[:, None] * gamma_CY, beta_CY + shift[:, None] * gamma_CY)
        )
        tensors[f"{stem}fc.bias"] = torch.cat(
            (scale * (1 + gamma_C) - 1, beta_C + shift * (1 + gamma_C))
        )
    return tensors


def _flatten(nested: Any) -> dict[str, Tensor]:
    """Flatten nested state dicts; removes `module.`, a relic of data-parallel training."""
    if not isinstance(nested, dict) or not all(isinstance(part, dict) for part in nested.values()):
        raise WeightsError("The .pth file must hold state dicts by module, as Kokoro's does.")
    return {
        f"{module}.{name.removeprefix('module.')}": tensor
        for module, part in nested.items()
        for name, tensor in part.items()
    }


def _node_tensors(graph: OnnxGraph, node: Node) -> Iterator[tuple[str, Tensor]]:
    path = _module_path(node.path.strip("/").split("/")[:-1])
    if node.operator == "LSTM":
        yield from _lstm_tensors(graph, node, path)
        return
    weight = _tensor(graph.tensor(node.inputs[1]))
    yield f"{path}.weight", weight.T if node.operator == "MatMul" else weight


def _lstm_tensors(graph: OnnxGraph, node: Node, path: str) -> Iterator[tuple[str, Tensor]]:
    """The gates in torch's order, from stacked directions and separate biases."""
    weight_ih, weight_hh, bias = (_tensor(graph.tensor(name)) for name in node.inputs[1:4])
    for index, suffix in enumerate(("", "_reverse")):
        bias_ih, bias_hh = bias[index].chunk(2)
        parts = {
            "weight_ih": weight_ih[index],
            "weight_hh": weight_hh[index],
            "bias_ih": bias_ih,
            "bias_hh": bias_hh,
        }
        for kind, part in parts.items():
            gates = part.chunk(4)
            yield f"{path}.{kind}_l0{suffix}", torch.cat([gates[gate] for gate in _ONNX_GATES])


def _module_path(scopes: list[str]) -> str:
    """The torch module of a traced path; a scope that repeats its parent's name extends it."""
    path: list[str] = []
    for scope in scopes:
        if path and scope.startswith(f"{path[-1]}."):
            path.pop()
        path.append(scope)
    name = ".".join(path).removeprefix("encoder.")
    if name.startswith("decoder.decoder."):
        name = name.removeprefix("decoder.")
    if name.startswith(("F0.", "N.", "shared")):  # called from outside the predictor
        name = f"predictor.{name}"
    return name


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array.copy())
