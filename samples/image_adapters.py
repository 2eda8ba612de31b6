"""LoRA adapters of images from Python: load, choose, mix and unload them.

Run it with `python samples/image_adapters.py [FILE]...`, with adapters of the embedded model;
without any it writes two random ones. No network is needed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from triptych import ImagePipeline

PROMPT = "a red apple"


def write_random_adapter(file: Path, seed: int) -> Path:
    """Write an adapter of the embedded model's attention, of rank 2, in diffusers' layout."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from triptych.modalities.diffusion.source import FOLDER

    generator, tensors = torch.Generator().manual_seed(seed), {}
    (stored,) = (FOLDER / "transformer").glob("*.safetensors")
    with safe_open(stored, "pt") as weights:
        for key in weights.keys():  # noqa: SIM118 (it is no mapping)
            if key.endswith("attn.to_q.weight"):
                num_outputs, num_inputs = weights.get_slice(key).get_shape()
                path = f"transformer.{key.removesuffix('.weight')}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(2, num_inputs, generator=generator)
                tensors[f"{path}.lora_B.weight"] = torch.randn(num_outputs, 2, generator=generator)
    save_file(tensors, file)
    return file


def show(generate: ImagePipeline, files: list[Path]) -> None:
    """Generate with each adapter, with all of them, and with none."""
    for file in files:
        generate.load_lora_weights(file, adapter_name=file.stem)
    names = [file.stem for file in files]
    for chosen in (*names, names, []):
        generate.set_adapters(chosen)
        (apple,) = generate(PROMPT, seed=1, num_steps=6)
        print(generate.get_active_adapters() or "no adapter", f"{apple.elapsed_s:.1f} s")
    (apple,) = generate(PROMPT, seed=1, num_steps=6, adapters={names[0]: 0.4})  # of this call alone
    generate.unload_lora_weights()


def main() -> None:
    """Show the adapters of the command line, or two random ones."""
    files = list(map(Path, sys.argv[1:]))
    with ImagePipeline.from_pretrained() as generate, tempfile.TemporaryDirectory() as folder:
        random = (("ink", 1), ("gold", 2))
        show(
            generate,
            files or [write_random_adapter(Path(folder, f"{n}.safetensors"), s) for n, s in random],
        )


if __name__ == "__main__":
    main()
