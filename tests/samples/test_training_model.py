"""The image recipe's model: fast forms compute the same, training goes on, exports are adopted."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, FluxPipeline
from safetensors import safe_open

from triptych.modalities.diffusion.source import FOLDER

pytestmark = pytest.mark.usefixtures("image_recipe")
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*_SPECIAL, "a", "cat", "dog", *(f"word{number}" for number in range(192))]


def _random_model(size: Any) -> Any:
    """A model none of whose parts is without effect."""
    from model import Model

    torch.manual_seed(0)
    model = Model(torch.randn(len(PIECES), 384), size).eval()
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def _velocities(model: Any, ids: torch.Tensor, num_tokens: int = 64) -> torch.Tensor:
    noisy = torch.randn(len(ids), num_tokens, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = model(noisy, torch.linspace(0.2, 0.9, len(ids)), ids)
    return found


def test_fast_forms_compute_what_diffusers_does() -> None:
    from cpu_forms import use_cpu_forms
    from model import ModelSize

    model = _random_model(ModelSize(2, 1, 4))
    ids = torch.tensor([[2, 5, 6, 3], [2, 5, 7, 3]])
    expected = _velocities(model, ids)
    use_cpu_forms(model.transformer)
    torch.testing.assert_close(_velocities(model, ids), expected, atol=2e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_layers_compute_in_bfloat16_where_that_is_fast(
    is_fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    import precision

    monkeypatch.setattr(precision, "has_fast_cpu_bfloat16", lambda: is_fast)
    layer = torch.nn.Linear(4, 4)
    with precision.mixed_precision(torch.device("cpu")):
        assert layer(torch.ones(2, 4)).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_muon_of_all_matrices_at_once_is_torchs(dtype: torch.dtype) -> None:
    from muon import Muon

    generator = torch.Generator().manual_seed(0)
    shapes = ((24, 64), (64, 24), (24, 64))
    begun = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]

    def changes(optimizer_of: Any) -> list[torch.Tensor]:
        matrices = [torch.nn.Parameter(matrix.clone()) for matrix in begun]
        optimizer = optimizer_of(matrices)
        for step in gradients:
            for matrix, gradient in zip(matrices, step, strict=True):
                matrix.grad = gradient.clone()
            optimizer.step()
        return [matrix.detach() - old for matrix, old in zip(matrices, begun, strict=True)]

    theirs = changes(
        lambda matrices: torch.optim.Muon(
            matrices, 0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
    )
    ours = changes(lambda matrices: Muon(matrices, 0.1, weight_decay=0.01, dtype=dtype))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() < 0.05 * other.norm()  # theirs is in bfloat16


def test_own_run_is_that_of_diffusers() -> None:
    from model import ModelSize

    model = _random_model(ModelSize(2, 1, 4))
    ids = torch.tensor([[2, 5, 6, 3]])
    noisy = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
    words, whole = model.readers(ids)
    with torch.inference_mode():
        (expected,) = model.transformer(
            hidden_states=noisy,
            timestep=torch.tensor([0.2]),
            pooled_projections=whole,
            encoder_hidden_states=words,
            txt_ids=torch.zeros(4, 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32),
            return_dict=False,
        )
    torch.testing.assert_close(_velocities(model, ids), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    """A corpus of 32 random latents."""
    from alignment import LABEL_SIZE, PLAN_SIZE
    from corpus import Corpus, Shard

    rng = np.random.default_rng(0)
    latents, labels, plans, codes = (
        rng.standard_normal((32, *shape)).astype(np.float16)
        for shape in ((64, 32), (64, LABEL_SIZE), (PLAN_SIZE,), (32,))
    )
    captions = [["a cat", "a dog", "cat"]] * 8
    for number in range(4):
        rows = slice(8 * number, 8 * number + 8)
        parts = latents[rows], labels[rows], plans[rows], codes[rows].astype(np.float32)
        Corpus(tmp_path).add(number, Shard(*parts, captions))
    return tmp_path


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word pieces that nobody has to fetch."""
    import adoption
    import model_training

    def choose_tokens(minilm: Path, captions: object, known: object = ()) -> Any:
        chosen = list(known or PIECES)  # type: ignore[call-overload]
        return chosen, torch.randn(len(chosen), 384, generator=torch.Generator().manual_seed(0))

    for module in (model_training, adoption):
        monkeypatch.setattr(module, "choose_tokens", choose_tokens)


@pytest.fixture
def process_settings() -> Iterator[None]:
    """Training sets the process's threads, signals and attention: as before afterwards."""
    flags = [
        (
            getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled")(),
        )
        for kind in ("flash", "mem_efficient", "cudnn", "math")
    ]
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    num_threads, interval_s = torch.get_num_threads(), sys.getswitchinterval()
    handler = signal.getsignal(signal.SIGTERM)
    yield
    for enable, was in flags:
        enable(was)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduced)
    torch.set_num_threads(num_threads)
    sys.setswitchinterval(interval_s)
    signal.signal(signal.SIGTERM, handler)


def _weights(trainer: Any) -> list[torch.Tensor]:
    parts = (trainer.model, trainer.mean, trainer.aligner)
    return [value.clone() for part in parts for value in part.state_dict().values()]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.usefixtures("pieces", "process_settings")
def test_training_goes_on_where_it_ended(corpus_folder: Path) -> None:
    from model import ModelSize
    from model_training import ModelTrainer, ModelTraining

    options = ModelTraining(minutes=1e-9, num_rows=16, compiles=False, learning_rate=1e-3)

    def trainer() -> Any:
        return ModelTrainer(corpus_folder, Path(), options, ModelSize(1, 1, 4))

    first = trainer()
    begun = _weights(first)
    first.train()  # one update, and a checkpoint
    assert first.num_iterations == 1
    assert any(not torch.equal(*pair) for pair in zip(begun, _weights(first), strict=True))
    again = trainer()
    assert (again.num_iterations, again.spent_s) == (1, first.spent_s)
    torch.testing.assert_close(again.losses, first.losses)
    batch = next(again._batches())
    for either in (first, again):
        torch.manual_seed(5)
        either.step(batch)
    for one, other in zip(_weights(first), _weights(again), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.usefixtures("pieces", "process_settings")
def test_an_adopted_model_waits_for_its_aligner(corpus_folder: Path) -> None:
    from model_training import ModelTrainer, ModelTraining

    options = ModelTraining(minutes=1e-9, num_rows=16, compiles=False, start=FOLDER)
    trainer = ModelTrainer(corpus_folder, Path(), options, _size_of_embedded())
    parts = (trainer.model, trainer.aligner)
    begun = [[value.clone() for value in part.parameters()] for part in parts]
    trainer.train()  # one update
    of_model, of_aligner = (
        [torch.equal(*pair) for pair in zip(old, part.parameters(), strict=True)]
        for old, part in zip(begun, parts, strict=True)
    )
    assert all(of_model)
    assert not all(of_aligner)


def _size_of_embedded(num_more_single: int = 0) -> Any:
    from model import ModelSize

    config = json.loads((FOLDER / "transformer" / "config.json").read_text())
    return ModelSize(
        config["num_attention_heads"],
        config["num_layers"],
        config["num_single_layers"] + num_more_single,
    )


@pytest.mark.usefixtures("pieces")
def test_an_adopted_model_draws_as_the_exported_one() -> None:
    from adoption import adopt

    tokens, model = adopt(FOLDER, Path(), [], _size_of_embedded(num_more_single=1))
    pipeline = FluxPipeline.from_pretrained(FOLDER, dtype=torch.float32)
    assert pipeline.tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    ids = pipeline.tokenizer(["a red apple"], return_tensors="pt")["input_ids"]
    noisy = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        (expected,) = pipeline.transformer(
            hidden_states=noisy,
            timestep=torch.tensor([0.2]),
            pooled_projections=pipeline.text_encoder(ids).pooler_output,
            encoder_hidden_states=pipeline.text_encoder_2(ids).last_hidden_state,
            txt_ids=torch.zeros(ids.shape[1], 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32),
            return_dict=False,
        )
    torch.testing.assert_close(_velocities(model.eval(), ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("pieces")
def test_an_export_with_more_blocks_is_refused() -> None:
    from adoption import adopt

    with pytest.raises(SystemExit, match="--single-blocks"):
        adopt(FOLDER, Path(), [], _size_of_embedded(num_more_single=-1))


def test_an_adopted_codec_has_the_exported_weights(tmp_path: Path) -> None:
    from adoption import adopt_codec, adopt_scale
    from codec import open_codec
    from corpus import Corpus

    adopt_codec(tmp_path, FOLDER)
    codec = open_codec(tmp_path).state_dict()
    with safe_open(FOLDER / "vae" / "diffusion_pytorch_model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            torch.testing.assert_close(codec[name], file.get_tensor(name).float())
    adopt_scale(tmp_path, FOLDER)
    config = json.loads((FOLDER / "vae" / "config.json").read_text())
    mean, deviation = Corpus(tmp_path).scale
    assert (mean, 1 / deviation) == pytest.approx(
        (config["shift_factor"], config["scaling_factor"])
    )


def test_a_decoder_of_another_size_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import adoption
    from codec import new_codec

    def larger() -> AutoencoderDC:
        return AutoencoderDC.from_config(
            {**new_codec().config, "decoder_layers_per_block": (1,) * 4}
        )

    monkeypatch.setattr(adoption, "new_codec", larger)
    adoption.adopt_codec(tmp_path, FOLDER)
    assert "codec --encoder-minutes 0" in capsys.readouterr().out
    state = torch.load(tmp_path / "codec.pt", weights_only=True)["codec"]
    codec = larger()
    codec.load_state_dict(state)
    with safe_open(FOLDER / "vae" / "diffusion_pytorch_model.safetensors", "pt") as file:
        kept = [name for name in file.keys() if name.startswith("encoder.")]  # noqa: SIM118
        assert kept
        for name in kept:
            torch.testing.assert_close(state[name], file.get_tensor(name).float())


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (("model", "--rows", "0"), "--rows"),
        (("model", "--rows", "24"), "multiple of 16"),
        (("codec", "--workers", "-1"), "--workers"),
        (("latents", "--threads", "2"), "--workers"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    given: tuple[str, ...],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import train_image

    monkeypatch.setattr(sys, "argv", ["train_image.py", *given, "--folder", "RUN"])
    with pytest.raises(SystemExit):
        train_image.main()
    assert advice in capsys.readouterr().err.splitlines()[-1]
