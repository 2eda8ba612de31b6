"""The image recipe's data: captions are true, and a caption has many images; its measures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image, ImageDraw

SIDE = 144
pytestmark = pytest.mark.usefixtures("image_recipe")


class Shapes:
    """Stands in for the sets: each draws every emoji but one as a two-coloured rectangle."""

    def has(self, set_name: str, emoji: str) -> bool:
        return set_name != "twemoji" or emoji != "cat2"

    def drawing(self, set_name: str, emoji: str) -> Image.Image:
        shade = sum(map(ord, set_name + emoji)) % 200
        picture = Image.new("RGBA", (SIDE, SIDE * 3 // 4), (200, shade, 30, 255))
        ImageDraw.Draw(picture).rectangle((0, 0, SIDE // 3, SIDE), fill=(20, shade, 220, 255))
        return picture


@pytest.fixture(scope="module")
def catalogue() -> Any:
    from pictures.compositions import open_catalogue

    return open_catalogue()


@pytest.fixture(scope="module")
def arrangements() -> ModuleType:
    import pictures.arrangements

    return pictures.arrangements


def of(arrangements: ModuleType, relation: str, *names: str, **said: Any) -> Any:
    from pictures.compositions import Thing

    return arrangements.Arrangement(relation, tuple(Thing(name) for name in names), **said)


def images(catalogue: Any, one: Any, seeds: range) -> np.ndarray:
    from pictures.rendering import render

    drawn = [render(one, catalogue, Shapes(), np.random.default_rng(seed)) for seed in seeds]
    return np.stack([np.asarray(image).astype(int) for image in drawn])


def test_one_caption_has_many_images(arrangements: ModuleType, catalogue: Any) -> None:
    one = of(arrangements, "", "cat")
    drawn = images(catalogue, one, range(8))
    distances = [np.abs(a - b).mean() for i, a in enumerate(drawn) for b in drawn[:i]]
    assert min(distances) > 5
    np.testing.assert_array_equal(drawn[3], images(catalogue, one, range(3, 4))[0])


def test_a_caption_says_all_that_an_arrangement_holds(
    arrangements: ModuleType, catalogue: Any
) -> None:
    from pictures.descriptions import Describer
    from pictures.grounds import Ground

    rng = np.random.default_rng(0)
    one = of(
        arrangements,
        "riding",
        "tiger",
        "castle",
        ground=Ground("blue", "striped"),
        style="cartoon",
    )
    said = Describer(catalogue, rng).describe(one)
    for word in ("a tiger rid", "a castle", "blue striped", "cartoon"):
        assert word in said
    for _ in range(300):
        found = arrangements.sample_arrangement(catalogue, rng)
        said = Describer(catalogue, rng).describe(found)
        for thing in found.things:
            assert thing.colour is None or thing.colour in said
        for part in (found.ground.colour, found.ground.pattern, found.style):
            assert part in said


@pytest.mark.parametrize(
    ("relation", "axis", "sign"), [("above", "y", -1), ("under", "y", 1), ("left of", "x", -1)]
)
def test_relations_put_things_where_they_say(relation: str, axis: str, sign: int) -> None:
    from pictures.placement import place

    for seed in range(50):
        placed = place(relation, "", np.random.default_rng(seed))
        spots = {each.index: getattr(each.spot, axis) for each in placed}
        assert sign * (spots[0] - spots[1]) > 0.1


def test_the_first_thing_is_between_the_others() -> None:
    from pictures.placement import place

    for seed in range(50):
        placed = place("between", "", np.random.default_rng(seed))
        x = {each.index: each.spot.x for each in placed}
        assert min(x[1], x[2]) < x[0] < max(x[1], x[2])


def test_what_is_in_something_is_hidden_by_its_front() -> None:
    from pictures.placement import place

    behind, inside = place("in", "", np.random.default_rng(0))
    assert (behind.index, inside.index) == (1, 0)
    assert behind.front < 1 == inside.front


def test_drawings_begin_where_tokens_do(
    arrangements: ModuleType, catalogue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pictures.rendering
    from pictures.grounds import Ground

    monkeypatch.setattr(pictures.rendering, "_TURNED_SHARE", 0.0)
    plain = of(arrangements, "", "cat", ground=Ground("white"))
    widths, corners = set(), set()
    for image in images(catalogue, plain, range(40)):
        rows, columns = np.nonzero(image.min(-1) < 150)
        corners |= {(columns.min(), rows.min())}
        widths |= {columns.max() - columns.min() + 1}
    assert all(x % 16 == 0 and y % 16 == 0 for x, y in corners)
    assert len(corners) > 5
    assert widths == {48, 64}


def test_a_style_is_honoured_or_given_up(arrangements: ModuleType, catalogue: Any) -> None:
    from pictures.drawings import SETS
    from pictures.rendering import choose_set, drawable

    rng = np.random.default_rng(0)
    flat = of(arrangements, "", "dog", style="flat")
    chosen = {choose_set(flat, catalogue, Shapes(), rng) for _ in range(60)}
    assert chosen == {name for name, one in SETS.items() if one.style == "flat"}
    missing = of(arrangements, "", "cat", style="twemoji")
    assert drawable(missing, catalogue, Shapes()).style == ""


def test_a_set_that_lacks_a_thing_changes_no_other_choice(
    arrangements: ModuleType, catalogue: Any
) -> None:
    from pictures.chances import CODE_SIZE, Chances
    from pictures.drawings import SETS
    from pictures.rendering import choose_set

    def chosen(thing: str, code: np.ndarray) -> str:
        chances = Chances.told(code, np.random.default_rng(0))
        return choose_set(of(arrangements, "", thing), catalogue, Shapes(), chances.places)

    codes = np.random.default_rng(1).standard_normal((4000, CODE_SIZE))
    of_dogs, of_cats = ([chosen(thing, code) for code in codes] for thing in ("dog", "cat"))
    pairs = list(zip(of_dogs, of_cats, strict=True))
    assert all(cat == dog for dog, cat in pairs if dog != "twemoji")
    assert "twemoji" not in of_cats
    for name, one in SETS.items():
        assert of_dogs.count(name) / len(codes) == pytest.approx(one.weight, abs=0.03)


def test_a_named_ground_has_its_colour() -> None:
    from pictures.compositions import BACKGROUNDS
    from pictures.grounds import Ground, paint_ground

    for seed in range(20):
        painted = paint_ground(Ground("blue"), 32, np.random.default_rng(seed))
        assert np.abs(painted.mean((0, 1)) - BACKGROUNDS["blue"]).max() <= 14
        night = paint_ground(Ground(scene="night"), 32, np.random.default_rng(seed))
        assert night.mean() < 90


def test_a_sixteenth_is_held_out(arrangements: ModuleType, catalogue: Any) -> None:
    rng = np.random.default_rng(0)
    found = [arrangements.sample_arrangement(catalogue, rng) for _ in range(2000)]
    share = np.mean([one.is_held_out for one in found])
    assert 0.045 < share < 0.08


@pytest.mark.parametrize(
    ("relation", "order", "other"),
    [
        ("next to", (1, 0, 2), "next to"),
        ("above", (1, 0, 2), "below"),
        ("in front of", (1, 0, 2), "behind"),
        ("between", (0, 2, 1), "between"),
    ],
)
def test_what_looks_alike_is_held_out_together(
    arrangements: ModuleType, catalogue: Any, relation: str, order: tuple[int, ...], other: str
) -> None:
    num_things = 3 if relation == "between" else 2
    kept = set()
    for start in range(60):
        names = catalogue.names[start : start + num_things]
        turned = [names[number] for number in order[:num_things]]
        one, twin = of(arrangements, relation, *names), of(arrangements, other, *turned)
        assert one.is_held_out == twin.is_held_out
        kept.add((one.is_held_out, of(arrangements, "left of", *names).is_held_out))
    assert len(kept) > 2  # other relations are held out apart


def test_a_thing_in_its_own_colour_is_held_out_with_it(arrangements: ModuleType) -> None:
    from pictures.compositions import Thing

    for name in ("banana", "frog", "tomato", "pumpkin"):
        plain, said = (Thing(name, colour) for colour in (None, "yellow"))
        ways = [arrangements.Arrangement("", (thing,)) for thing in (plain, said)]
        assert ways[0].is_held_out == ways[1].is_held_out


def test_measures_fail_a_collapsed_model() -> None:
    import diversity

    generator = torch.Generator().manual_seed(0)
    real = torch.randn(20, 8, 4, generator=generator)
    fresh = torch.randn(20, 8, 4, generator=generator)
    collapsed = real[:, :1].expand(-1, 8, -1)
    assert diversity.mean_distance(collapsed) == pytest.approx(0, abs=1e-3)
    assert diversity.mean_distance(fresh) == pytest.approx(diversity.mean_distance(real), rel=0.1)
    flat, other = real.flatten(0, 1), fresh.flatten(0, 1)
    assert min(diversity.precision_recall(other, flat)) > 0.8
    precision, recall = diversity.precision_recall(collapsed.flatten(0, 1), flat)
    assert precision == 1
    assert recall < 0.3
    assert diversity.nearest_distance(collapsed.flatten(0, 1), flat) == pytest.approx(0, abs=1e-3)
    assert diversity.mean_number(["a", "a", "b", "c"], 2) == 1.5
    assert diversity.mean_spread(collapsed) == pytest.approx(0, abs=1e-6)


def cat_left_of_dog(arrangements: ModuleType, catalogue: Any) -> tuple[Any, Any]:
    """An image of both on white, and the sketch of it."""
    from pictures.chances import Chances
    from pictures.grounds import Ground
    from pictures.rendering import paint, sketch

    one = of(arrangements, "left of", "cat", "dog", ground=Ground("white"))
    rng = np.random.default_rng(4)
    chosen = sketch(one, catalogue, Shapes(), rng)
    return paint(one, catalogue, Shapes(), Chances.free(rng), chosen), chosen


def test_labels_say_what_is_drawn_at_each_token(arrangements: ModuleType, catalogue: Any) -> None:
    from alignment import LABEL_SIZE, Labeller

    drawn, chosen = cat_left_of_dog(arrangements, catalogue)
    labeller = Labeller(catalogue)
    labels = labeller.labels(drawn, ["cat", "dog"], chosen.set_name).reshape(8, 8, LABEL_SIZE)
    pixels = np.asarray(drawn.image).reshape(8, 16, 8, 16, 3).min((1, 3, 4))
    is_thing = labels[..., :45].any(-1)
    np.testing.assert_array_equal(is_thing & (pixels > 230), False)
    names = np.where(
        labels[..., :45] @ (labeller._things["cat"] - labeller._things["dog"]) > 0, 0, 1
    )
    columns = np.broadcast_to(np.arange(8), (8, 8))
    colours = (labels[..., -3:] / 0.3 + 2) * 64
    assert (colours[~is_thing] > 200).all()
    assert colours[is_thing].min() < 100
    assert columns[is_thing & (names == 0)].max() < columns[is_thing & (names == 1)].min()
    turned = labeller.labels(drawn, ["dog", "cat"], chosen.set_name).reshape(8, 8, LABEL_SIZE)
    assert not np.array_equal(turned, labels)


def test_a_plan_says_where_each_thing_is(arrangements: ModuleType, catalogue: Any) -> None:
    from alignment import PLAN_SIZE, Aligner, plan_of
    from pictures.drawings import SETS

    drawn, chosen = cat_left_of_dog(arrangements, catalogue)
    plan = plan_of(drawn, chosen.set_name).astype(np.float32)
    slots, is_set, ground = np.split(plan, (25, 25 + len(SETS)))
    slots = slots.reshape(5, 5)
    np.testing.assert_array_equal(slots[:, 0], (1, 1, 0, 0, 0))
    assert slots[0, 1] < 0 < slots[1, 1]
    assert not slots[2:].any()
    assert list(SETS)[is_set.argmax()] == chosen.set_name
    assert (ground > 1.8).all()

    aligner = Aligner(PLAN_SIZE)
    with torch.no_grad():
        aligner.planner.weight.copy_(torch.eye(PLAN_SIZE))
        aligner.planner.bias.zero_()
    plans = torch.from_numpy(plan)[None]
    told = plans[:, None].repeat(1, 64, 1)
    assert aligner.planning_loss(told, plans).item() == 0
    told[:, 5, 1] += 1
    assert aligner.planning_loss(told, plans).item() > 0


def test_a_code_tells_set_places_poses_and_ground(arrangements: ModuleType, catalogue: Any) -> None:
    from pictures.chances import CODE_SIZE, Chances
    from pictures.rendering import paint, sketch

    one = of(arrangements, "", "cat")

    def drawn(code: np.ndarray, seed: int) -> tuple[Any, Any]:
        chances = Chances.told(code, np.random.default_rng(seed))
        chosen = sketch(one, catalogue, Shapes(), chances.places)
        return chosen, paint(one, catalogue, Shapes(), chances, chosen)

    codes = np.random.default_rng(0).standard_normal((30, CODE_SIZE))
    for code in codes:
        (first, image), (second, other) = drawn(code, 1), drawn(code, 2)
        assert (first, image.poses) == (second, other.poses)
    sets, poses = set(), set()
    for code in codes:
        chosen, image = drawn(code, 1)
        sets.add(chosen.set_name)
        poses.add(image.poses)
    assert len(sets) > 2
    assert len(poses) > 10
    kinds = [drawn(code, 1)[0].placed[0].spot.size for code in codes]
    assert len(set(kinds)) > 1


def test_a_code_tells_the_ground(arrangements: ModuleType, catalogue: Any) -> None:
    from pictures.chances import CODE_SIZE, Chances
    from pictures.rendering import paint, sketch

    one = of(arrangements, "", "cat")

    def ground(code: np.ndarray, seed: int) -> np.ndarray:
        chances = Chances.told(code, np.random.default_rng(seed))
        chosen = sketch(one, catalogue, Shapes(), chances.places)
        drawn = paint(one, catalogue, Shapes(), chances, chosen)
        return np.where(drawn.owners[..., None] == 0, np.asarray(drawn.image).astype(int), 0)

    codes = np.random.default_rng(0).standard_normal((12, CODE_SIZE))
    first, second = ([ground(code, seed) for code in codes] for seed in (1, 2))
    alike = [np.abs(a - b).mean() for a, b in zip(first, second, strict=True)]
    apart = [np.abs(a - b).mean() for a, b in pairwise(first)]
    assert max(alike) < 10  # scenes have more to choose than the code tells
    assert np.mean(alike) < np.mean(apart) / 10


def test_a_code_tells_places_of_every_relation(arrangements: ModuleType) -> None:
    """As far as it reaches: five things have more places than it has values."""
    from pictures.chances import CODE_SIZE, Chances
    from pictures.placement import place

    codes = np.random.default_rng(0).standard_normal((20, CODE_SIZE))
    for relation in arrangements._CHANCES:
        for code in codes:
            first, second = (
                place(relation, "", Chances.told(code, np.random.default_rng(seed)).poses)
                for seed in (1, 2)
            )
            for one, other in zip(first, second, strict=True):
                assert one.index == other.index
                assert (one.spot.x, one.spot.y) == pytest.approx(
                    (other.spot.x, other.spot.y), abs=0.09
                )


def test_what_a_code_cannot_tell_is_refused() -> None:
    from pictures.chances import CODE_SIZE, Chances

    told = Chances.told(np.zeros(CODE_SIZE), np.random.default_rng(0)).places
    with pytest.raises(NotImplementedError, match="order"):
        told.permutation(3)
    with pytest.raises(NotImplementedError, match="uniform"):
        told.standard_normal()


def test_noise_with_codes_is_normal_and_carries_most() -> None:
    from noise import coded_noise

    torch.manual_seed(0)
    codes = torch.randn(2000, 32)
    noise = coded_noise(codes, 64)
    is_coded = (8 * noise.mean(1) - codes).abs().amax(1) < 1e-4
    assert 0.8 < is_coded.float().mean() < 0.95
    together = torch.cov(noise.flatten(1)[:, ::37].T)
    torch.testing.assert_close(together, torch.eye(len(together)), atol=0.15, rtol=0)


def test_the_reading_loss_falls_as_tokens_tell_code_and_place() -> None:
    from alignment import Aligner
    from noise import coded_noise

    torch.manual_seed(0)
    aligner, level = Aligner(40), torch.full((16,), 0.9)
    noise = coded_noise(torch.randn(16, 32), 64)
    with torch.no_grad():
        aligner.reader.weight.copy_(torch.eye(40))
        aligner.reader.bias.zero_()
    code = 8 * noise.mean(1, keepdim=True).expand_as(noise)
    middles = (torch.arange(8) + 0.5) / 8
    y, x = torch.meshgrid(middles, middles, indexing="ij")
    waves = [(torch.pi * k * at).cos().flatten() for at in (x, y) for k in range(1, 5)]
    place = torch.stack(waves, -1).expand(16, -1, -1)

    def loss(*hidden: torch.Tensor) -> float:
        return aligner.reading_loss(torch.cat(hidden, -1), noise, level).item()

    assert loss(code, place) < 1e-6
    assert loss(noise, place) > 0.5
    assert loss(code, place.flip(1)) > 0.5


def test_tokens_are_those_of_flux() -> None:
    from corpus import to_latents, to_tokens

    latents = torch.randn(2, 8, 16, 16)
    packed = FluxPipeline._pack_latents(latents, 2, 8, 16, 16)
    torch.testing.assert_close(to_tokens(latents), packed, atol=0, rtol=0)
    torch.testing.assert_close(to_latents(packed), latents, atol=0, rtol=0)


def test_a_full_vocabulary_takes_in_new_words_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import text
    from safetensors.torch import save_file

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = [*text._SPECIAL, *letters, *(f"##{letter}" for letter in letters), *".,-'!"]
    words = ["cat", "dog", "bird", "fish"]
    (tmp_path / "vocab.txt").write_text("\n".join([*pieces, *words]))
    table = torch.randn(len(pieces) + len(words), 8)
    save_file({"embeddings.word_embeddings.weight": table}, tmp_path / "model.safetensors")
    monkeypatch.setattr(text, "NUM_TOKENS", len(pieces))
    chosen, rows = text.choose_tokens(tmp_path, ["a cat"], known=pieces)
    assert chosen == [*pieces, "cat"]
    torch.testing.assert_close(rows[-1], table[len(pieces)])
