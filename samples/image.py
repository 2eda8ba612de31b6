"""Images from Python: one, a batch, a stream of previews, step caches, image to image.

Run it with `python samples/image.py`; it writes PNG files into the current folder. The model is
part of the package, so no network is needed.
"""

from __future__ import annotations

from triptych import ImagePipeline

PROMPT = "a penguin next to a house"


def main() -> None:
    """Show each way of calling the pipeline."""
    with ImagePipeline.from_pretrained() as generate:
        print("-- one image; the same seed generates it again")
        (apple,) = generate("a red apple", seed=1)
        apple.save("apple.png")
        print(f"apple.png: {apple.image.size}, {apple.num_steps} steps, {apple.elapsed_s:.1f} s")

        print("-- four images as a batch")
        for image in generate(PROMPT, num_images=4, seed=2):
            image.save(f"penguin-{image.index + 1}.png")
            print(f"penguin-{image.index + 1}.png after {image.elapsed_s:.1f} s")

        print("-- a stream of previews")
        for progress in generate.stream(PROMPT, num_previews=2, seed=2):
            if progress.preview is not None:
                print(f"step {progress.step}: a preview of {progress.preview.size}")
            if progress.image is not None:
                print(f"step {progress.step}: finished")

        print("-- with and without a step cache")
        for cache in ("off", "auto"):
            (car,) = generate(
                "a blue car on a yellow background", num_steps=50, cache=cache, seed=3
            )
            car.save(f"car-{cache}.png")
            computed = f"{car.num_computed} of {car.num_steps} steps computed"
            print(f"car-{cache}.png: {computed}, {car.elapsed_s:.1f} s")

        print("-- image to image")
        (green,) = generate("a green apple", image=apple.image, strength=0.7, seed=4)
        green.save("green.png")


if __name__ == "__main__":
    main()
