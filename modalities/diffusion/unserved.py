"""The reasons why pipeline classes of diffusers are not served, by their names.

Owns the reasons. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Container

_TASK = re.compile("Img2Img|Inpaint|PAG")
_REASONS = (
    ("Onnx", "its weights are in ONNX files"),
    ("StableDiffusion(XL)?Inpaint", "its UNet takes the mask as channels, as only FLUX.1 Fill may"),
    ("Control|Adapter|GLIGEN|VisualCloze|PaintByExample", "it needs control or example images"),
    (
        "SuperResolution|Upscale|Refiner|StableDiffusionXLImg2Img",
        "it enlarges or refines the images of another model",
    ),
    ("Prior|Redux|Emb2Emb", "it makes embeddings for another pipeline"),
    ("Combined|Kandinsky(V22)?(P|I)|StableCascade|Wuerstchen|UnCLIP", "it needs a second pipeline"),
    ("Marigold|Depth2Img|LDM3D", "it reads or makes maps of an image, such as its depth"),
    ("^IF|Pixel", "it denoises pixels, without an autoencoder"),
    ("Helios|Cosmos", "it is a video model, of which single frames are not offered"),
    (
        "^(DDIM|DDPM|DiT|PNDM|KarrasVe|ScoreSdeVe|LDM|RePaint|ConsistencyModel)Pipeline",
        "it reads no prompt",
    ),
)
_OTHER = "its steps are not implemented"


def reason_of(pipeline: str, served: Container[str]) -> str:
    """The reason, as the end of a sentence. `served`: the names of classes that are served."""
    for pattern, reason in _REASONS:
        if re.search(pattern, pipeline):
            return reason
    plain = _TASK.sub("", pipeline)
    if plain != pipeline and plain in served:
        return f"its weights are served where model_index.json names {plain}"
    return _OTHER
