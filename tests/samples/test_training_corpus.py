"""The image recipe's corpus: what is of one image stays together, from composing to batches."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from tests.samples.test_training_model import PIECES
from tests.samples.test_training_pictures import Shapes

pytestmark = pytest.mark.usefixtures("image_recipe")


def _shard(numbers: range) -> Any:
    """A shard of images whose latents, labels, plans, codes and captions say which they are."""
    from corpus import Shard

    which = np.array(numbers, np.float32)
    tokens = np.broadcast_to(which[:, None, None], (len(which), 64, 32))
    of_tokens, of_all = which[:, None, None], which[:, None]
    captions = [[f"word{number}"] * 3 for number in numbers]
    return Shard(tokens.astype(np.float16), of_tokens, of_all, of_all, captions)


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    """Four images, of scale 1 and 2."""
    from corpus import Corpus

    home = tmp_path / "corpus"
    home.mkdir()
    (home / "scale.json").write_text('{"mean": 1.0, "deviation": 2.0}')
    corpus = Corpus(tmp_path)
    corpus.add(0, _shard(range(4)))
    return corpus


def _examples(corpus: Any) -> Any:
    from examples import Examples
    from text import new_tokenizer

    return Examples(corpus, new_tokenizer(PIECES), torch.device("cpu"))


def test_batches_keep_what_is_of_one_image_together(corpus: Any) -> None:
    batch = _examples(corpus).batch(64, 8, torch.Generator().manual_seed(0))
    which = batch.plans[:, 0]
    assert set(which.tolist()) == {0, 1, 2, 3}
    for told in (batch.labels[:, 0, 0], batch.codes[:, 0], batch.clean[:, 5, 7] * 2 + 1):
        torch.testing.assert_close(told, which)
    said = batch.ids[:, 1]
    is_dropped = said == PIECES.index("[SEP]")
    assert 0 < is_dropped.sum() < 20
    words = torch.tensor([PIECES.index(f"word{number:.0f}") for number in which])
    torch.testing.assert_close(said[~is_dropped], words[~is_dropped])


def test_new_shards_are_taken_in(corpus: Any) -> None:
    examples = _examples(corpus)
    corpus.add(2, _shard(range(8, 12)))  # a worker was faster
    corpus.add(1, _shard(range(4, 8)))
    for _ in range(100):
        examples.refresh()
        if len(examples) == 12:
            break
        time.sleep(0.02)
    seen = examples.batch(500, 8, torch.Generator().manual_seed(0)).plans[:, 0]
    assert set(seen.tolist()) == set(range(12))


@pytest.mark.parametrize("num_words", [3, 14, 15, 40])
def test_captions_are_cut_as_the_tokenizer_does(corpus: Any, num_words: int) -> None:
    from corpus import Shard
    from examples import tokenize
    from text import new_tokenizer

    shard = _shard(range(4))
    said = " ".join(["cat", "dog"] * 20).split()[:num_words]
    shard = Shard(
        *(getattr(shard, name) for name in ("latents", "labels", "plans", "codes")),
        [[" ".join(said)] * 3] * 4,
    )
    corpus.add(0, shard)
    ids = _examples(corpus).batch(16, 16, torch.Generator().manual_seed(0)).ids
    expected = tokenize(new_tokenizer(PIECES), [" ".join(said), ""], 16)
    assert {tuple(row) for row in ids.tolist()} <= {tuple(row) for row in expected.tolist()}
    assert expected[0].tolist() in ids.tolist()


def test_the_first_images_are_what_the_codec_made(
    corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import corpus as module

    monkeypatch.setattr(module, "SHARD", 4)
    corpus.add(1, _shard(range(4, 8)))
    stored = corpus.stored(6)
    assert stored.shape == (6, 8, 16, 16)
    assert stored[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert list(corpus.captions())[::3] == [f"word{number}" for number in range(8)]


def test_a_shard_is_the_same_by_every_composer(monkeypatch: pytest.MonkeyPatch) -> None:
    import composing
    from codec import new_codec
    from pictures.compositions import open_catalogue

    monkeypatch.setattr(composing, "SHARD", 40)
    torch.manual_seed(0)
    codec = new_codec().eval()
    one, other = (
        composing.ShardComposer(codec, open_catalogue(), Shapes()).shard(7)  # type: ignore[arg-type]
        for _ in range(2)
    )
    assert one.captions == other.captions
    assert one.latents.shape == (40, 64, 32)
    for name in ("latents", "labels", "plans", "codes"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    another = composing.ShardComposer(codec, open_catalogue(), Shapes()).shard(8)  # type: ignore[arg-type]
    assert another.captions != one.captions


class _HerePool(Executor):
    """Stands in for processes: the first few calls are made at once, all others never."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls, self.ordered = num_calls, 0

    def submit(self, call: Any, /, *given: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        self.ordered += 1
        if self.ordered <= self.num_calls:
            future.set_result(call(*given))
        return future


def test_shards_that_are_missing_are_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import composing
    from corpus import Corpus

    made = []

    class Composer:
        def shard(self, number: int) -> Any:
            made.append(number)
            return _shard(range(4 * number, 4 * number + 4))

    Corpus(tmp_path).add(1, _shard(range(4, 8)))
    scale = Corpus(tmp_path).scale
    monkeypatch.setattr(composing, "worker_pool", lambda num: nullcontext(_HerePool(99)))
    monkeypatch.setattr(composing, "_composer", lambda folder: Composer())
    monkeypatch.setattr(composing, "fetch_drawings", lambda folder, catalogue: None)
    composing.write_shards(tmp_path, 4, num_workers=2)
    assert made == [0, 2, 3]
    assert list(Corpus(tmp_path).captions())[::12] == [f"word{n}" for n in (0, 4, 8, 12)]
    assert Corpus(tmp_path).scale == scale


def test_too_few_images_are_refused(corpus: Any) -> None:
    with pytest.raises(SystemExit, match="run `latents --shards 4`"):
        corpus.check(4096)


@pytest.fixture
def slow_crops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, _HerePool]:
    """Crops whose values are their batch's number, of which the first six are drawn."""
    import crops

    def draw(folder: Path, seed: tuple[int, int], num_rows: int, share: float) -> Any:
        return np.full((num_rows, 128, 128, 3), seed[1] + 100 * share, np.uint8)

    pool = _HerePool(6)
    monkeypatch.setattr(crops, "worker_pool", lambda num: nullcontext(pool))
    monkeypatch.setattr(crops, "_draw", draw)
    monkeypatch.setattr(crops, "_sampler", lambda folder: None)
    return crops.Crops(tmp_path, 2), pool


def test_a_trainer_does_not_wait_for_those_that_draw(slow_crops: tuple[Any, _HerePool]) -> None:
    crops, pool = slow_crops
    batches = crops.batches(0, 2, torch.device("cpu"))
    seen = {int(next(batches)[0, 0, 0, 0]) for _ in range(100)}
    assert seen == set(range(6))
    assert pool.ordered == 12


def test_a_trainer_gets_what_it_asks_for_at_once(slow_crops: tuple[Any, _HerePool]) -> None:
    crops, pool = slow_crops
    batches = crops.batches(0, 2, torch.device("cpu"))
    assert int(next(batches)[0, 0, 0, 0]) < 6
    crops.subject_share, pool.num_calls = 1.0, 18
    seen = {int(next(batches)[0, 0, 0, 0]) for _ in range(100)}
    assert seen == {100 + number for number in range(12, 18)}


def test_crops_show_what_is_asked() -> None:
    from crops import _ImageSampler
    from pictures.compositions import open_catalogue

    drawn = []

    class OneSprite:
        def codes(self, style: str) -> list[str]:
            return ["1f34e"]

        def draw(self, style: str, code: str, tint: str | None, size: int) -> Image.Image:
            drawn.append(size)
            return Image.new("RGBA", (size, size // 2), (250, 10, 10, 255))

    sampler = _ImageSampler(OneSprite(), open_catalogue(), Shapes())  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    assert sampler.image(rng, 1.0).shape == (128, 128, 3)
    assert not drawn
    assert sampler.image(rng, 0.0).shape == (128, 128, 3)
    assert len(drawn) == 4


_PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from workers import worker_pool
if __name__ == "__main__":
    import os
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        sys.stdin.read()
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    import workers

    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    command = [sys.executable, str(script), str(Path(workers.__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        worker.wait(timeout=30)
