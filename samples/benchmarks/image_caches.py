"""Step caches on one image model: at equal computed steps, and at equal quality.

    pip install '.[recipes,bench]'
    python samples/benchmarks/image_caches.py --model FOLDER --run RUN --output docs/benchmarks

`--model` is any folder in the hub's layout (default: the embedded model); `--run` is a folder of
the image recipe, or an empty one, for its classifier. For each number of steps, with and without
guidance, and each share of them that computes:

- planned caching, TeaCache, FBCache, TaylorSeer and MagCache, each at the best settings that the
  same number of trials finds on separate prompts and seeds
- the same number of steps without a cache

against the uncached images: PSNR, SSIM, distance in features, what the classifier names right,
and processor time. All in float32, so that only the cache makes a difference.

Finished cells are stored in image_caches.json of the output folder: a run that was stopped, or
that `--minutes` ended, continues from there. The table and the plot are made at the end of each
run, from the finished cells; `--report` makes only them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from step_caches.measures import Judge, feature_distances, psnr_db, ssim
from step_caches.methods import METHODS, CacheMethod, Method, Setting
from step_caches.report import markdown, save_plot
from step_caches.results import FEWER_STEPS, Cell, Reference, Results, Terms
from step_caches.search import Search
from step_caches.subject import GeneratedImages, ImageSpec, Sampling, Subject
from torch import Tensor

from triptych.modalities.diffusion.source import FOLDER

_TUNING_SEED, _OTHER_SEED = 10_000, 20_000
_NUM_TIMED = 2
_MOST = 0.5
_SHOWN = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A cell that is not finished yet. No method: fewer steps."""

    method: Method | None
    num_computed: int


class OutOfTime(Exception):
    """The time limit is reached; a later run continues."""


@dataclass(frozen=True, slots=True)
class Uncached:
    """Uncached images to compare with, and their features."""

    whole: GeneratedImages
    features: Tensor


class Benchmark:
    """All cells of one model, in order."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self._results = results
        self._terms = results.terms
        self._ends_at_s = time.monotonic() + 60 * args.minutes
        self._judge = Judge(args.run)
        self._subject = Subject(args.model, guidance=args.guidance, batch_size=args.batch)
        results.of_model(self._subject.digest)
        captions = self._judge.captions(self._terms.num_tuning + self._terms.num_images)
        specs = [ImageSpec(prompt, index, shows) for index, (prompt, shows) in enumerate(captions)]
        first = self._terms.num_tuning
        self._tuning = [ImageSpec(w.prompt, w.seed + _TUNING_SEED, w.shows) for w in specs[:first]]
        self._specs = specs[first:]

    def run(self) -> None:
        """Measure every missing cell; raises `OutOfTime` between two of them."""
        for num_steps in self._terms.steps:
            for is_guided in (True, False):
                self._run_sampling(Sampling(num_steps, is_guided))

    def _run_sampling(self, sampling: Sampling) -> None:
        wanted = list(self._wanted(sampling))
        if not wanted:
            return
        self._check_time()
        _SHOWN.print(f"{sampling.name}: uncached images")
        uncached = self._reference(sampling)
        search: Search | None = None
        for each in wanted:
            self._check_time()
            started_s = time.process_time()
            if each.method is None:
                fewer = Sampling(each.num_computed, sampling.is_guided)
                cell = self._cell(uncached, sampling, self._subject.generate(self._specs, fewer))
            else:
                if search is None:
                    search = self._search(sampling)
                cell = self._best_cell(each.method, each.num_computed, search, uncached, sampling)
            name = FEWER_STEPS if each.method is None else each.method.name
            self._results.put(sampling.name, name, each.num_computed, cell)
            _SHOWN.print(
                f"{sampling.name}: {name}, {each.num_computed} computed,"
                f" {time.process_time() - started_s:.0f} s of processor time"
            )

    def _search(self, sampling: Sampling) -> Search:
        return Search.of(self._subject, sampling, self._tuning, self._terms.num_trials)

    def _wanted(self, sampling: Sampling) -> Iterator[Wanted]:
        methods = [m for m in METHODS if self._subject.can_probe or not m.needs_blocks]
        for num_computed in self._terms.budgets(sampling.num_steps):
            for method in (None, *methods):
                name = method.name if method else FEWER_STEPS
                if not self._results.has(sampling.name, name, num_computed):
                    yield Wanted(method, num_computed)

    def _reference(self, sampling: Sampling) -> Uncached:
        """Uncached images, and the distance of those of another seed, as a scale."""
        whole = self._subject.generate(self._specs, sampling)
        features = self._judge.features(whole.images_BCHW)
        (others, *_) = self._subject.batches(self._specs)
        others = [ImageSpec(w.prompt, w.seed + _OTHER_SEED, w.shows) for w in others]
        images = self._subject.generate(others, sampling).images_BCHW
        count = len(others)
        is_right = self._judge.is_right(whole.images_BCHW, self._names)
        between = feature_distances(self._judge.features(images), features[:count])
        self._results.put_reference(
            sampling.name,
            Reference(
                right=sum(is_right) / len(is_right),
                seeds_psnr_db=psnr_db(images, whole.images_BCHW[:count]),
                seeds_features=between,
            ),
        )
        return Uncached(whole, features)

    def _best_cell(
        self,
        method: Method,
        num_computed: int,
        search: Search,
        uncached: Uncached,
        sampling: Sampling,
    ) -> Cell | None:
        best = search.best(method, num_computed)
        if best is None:
            return None
        cache = method.open(best.setting, search.known)
        generated = self._subject.generate(self._specs, sampling, cache)
        return self._cell(uncached, sampling, generated, cache, best.setting)

    def _cell(
        self,
        uncached: Uncached,
        sampling: Sampling,
        generated: GeneratedImages,
        cache: CacheMethod | None = None,
        setting: Setting | None = None,
    ) -> Cell:
        images, whole = generated.images_BCHW, uncached.whole.images_BCHW
        is_right = self._judge.is_right(images, self._names)
        return Cell(
            setting=dict(setting or {}),
            num_runs=generated.num_runs,
            psnr_db=psnr_db(images, whole),
            ssim=ssim(images, whole),
            features=feature_distances(self._judge.features(images), uncached.features),
            right=sum(is_right) / len(is_right),
            cpu_share=self._cpu_share(sampling, cache) if cache else None,
        )

    def _cpu_share(self, sampling: Sampling, cache: CacheMethod) -> float:
        """Processor time relative to uncached images, generated just before."""
        few = self._specs[:_NUM_TIMED]
        plain = self._subject.generate(few, sampling)
        return self._subject.generate(few, sampling, cache).cpu_s / plain.cpu_s

    @property
    def _names(self) -> Sequence[str]:
        return [spec.shows for spec in self._specs]

    def _check_time(self) -> None:
        if time.monotonic() > self._ends_at_s:
            raise OutOfTime


def main() -> None:
    """Measure the missing cells, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=FOLDER, help="a folder in the hub's layout")
    parser.add_argument("--run", type=Path, help="folder of the image recipe, for its classifier")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 28, 14])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.16, 0.2, 0.26, 0.36, 0.5])
    parser.add_argument("--images", type=int, default=48, help="that are measured")
    parser.add_argument("--tuning", type=int, default=8, help="images of a trial")
    parser.add_argument("--trials", type=int, default=24, help="of each method and budget")
    parser.add_argument("--guidance", type=float, help="guidance scale; default: the model's")
    parser.add_argument("--batch", type=int, default=8, help="images at once")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--note", default="", help="what the model is, for the table")
    parser.add_argument("--report", action="store_true", help="only make table and plot")
    args = parser.parse_args()
    if not all(0 < share <= _MOST for share in args.shares):
        parser.error(f"--shares lie between 0 and {_MOST}: plans compute half of the steps.")
    if args.run is None and not args.report:
        parser.error("--run is needed, for the classifier.")
    path = args.output / "image_caches.json"
    if args.report and not path.exists():
        parser.error(f"{path} does not exist: measure first, without --report.")
    results = Results.read(path) if args.report else _measure(args, path)
    print(markdown(results))
    save_plot(results, path.with_suffix(".png"))


def _measure(args: argparse.Namespace, path: Path) -> Results:
    """The results at the end, or after the given minutes."""
    args.output.mkdir(parents=True, exist_ok=True)
    terms = Terms(
        steps=args.steps,
        shares=args.shares,
        num_images=args.images,
        num_tuning=args.tuning,
        num_trials=args.trials,
        guidance=args.guidance,
        note=args.note,
    )
    results = Results.open(path, terms)
    benchmark = Benchmark(args, results)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        benchmark.run()
    except OutOfTime:
        _SHOWN.print("Out of time: the same command continues from here.")
    return results


if __name__ == "__main__":
    main()
