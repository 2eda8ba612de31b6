"""Images from Python, step by step: a callback that watches, changes and interrupts the steps.

Run it with `python samples/image_steps.py`. The model is part of the package, so no network is
needed.
"""

from __future__ import annotations

from typing import Any

from triptych import ImageInProgress, ImagePipeline


def watch(image: ImageInProgress, step: int, timestep: float, tensors: dict[str, Any]) -> None:
    """Print how far the latents are from zero after each step."""
    spread = float(tensors["latents"].std())
    print(f"image {image.index}, step {step} of {image.num_timesteps}: {timestep:.0f} {spread:.2f}")


def soften(
    image: ImageInProgress, step: int, timestep: float, tensors: dict[str, Any]
) -> dict[str, Any]:
    """Shrink the latents a little while they are mostly noise."""
    if step < 3:
        tensors["latents"] *= 0.98
    return tensors


def sketch(image: ImageInProgress, step: int, timestep: float, tensors: dict[str, Any]) -> None:
    """Keep the image as it is after half of the steps."""
    image.interrupt = step + 1 == image.num_timesteps // 2


def show(generate: ImagePipeline) -> None:
    """Show each use of a callback."""
    for callback in (watch, soften, sketch):
        (apple,) = generate("a red apple", seed=1, num_steps=8, callback_on_step_end=callback)
        print(f"{callback.__name__}: {apple.num_computed} of {apple.num_steps} steps computed")


def main() -> None:
    """Open the embedded model."""
    with ImagePipeline.from_pretrained() as generate:
        show(generate)


if __name__ == "__main__":
    main()
