"""Vision in chat: models that write text about images.

Owns how such a model is recognized and which functions open its halves. Loads neither.
"""

from __future__ import annotations

from triptych.core.options.command import Command
from triptych.core.weights.text_alone import missing_package
from triptych.modalities.modality import Modality

_HERE = "triptych.modalities.vlm"
_COMMANDS = (
    Command(
        "chat",
        "Chat with a model in the terminal, with images if it supports vision.",
        f"{_HERE}.api.cli",
        (
            "triptych chat",
            'triptych chat "Why is the sky blue?" --max-tokens 100',
            "triptych chat qwen2.5-coder-0.5b",
            'triptych chat qwen2.5-coder-0.5b "Write a haiku about Python."',
            'triptych chat --image apple.png "What colour is it?"',
            "git diff | triptych chat --system 'Write a commit message for this diff.'",
        ),
        operands="[MODEL] [PROMPT]",
        is_named=True,
    ),
    Command(
        "run",
        "Chat with this model, fetched if it is missing.",
        f"{_HERE}.api.cli",
        (
            "triptych run qwen2.5-coder-0.5b",
            'triptych run HuggingFaceTB/SmolLM2-360M-Instruct "Why is the sky blue?"',
        ),
        operands="MODEL [PROMPT]",
        is_named=True,
    ),
    Command(
        "see",
        "Ask about images.",
        f"{_HERE}.api.cli",
        (
            'triptych see apple.png "What is this?"',
            'triptych imagine "two green frogs" -o - | triptych see - "How many frogs are there?"',
            "triptych see before.jpg after.jpg 'What has changed?'"
            " --model HuggingFaceTB/SmolVLM-256M-Instruct",
        ),
        operands="IMAGE ... [QUESTION]",
        is_named=True,
    ),
)

VISION = Modality(
    role="vision",
    task=("chat", "chats", "/v1/chat/completions"),
    matches=lambda _, config: (
        isinstance(config.get("vision_config"), dict) and not missing_package(config)
    ),
    wire=(
        "triptych.core.engine_api.tokens:TokenRequest",
        "triptych.core.engine_api.tokens:TokenDelta",
    ),
    api=f"{_HERE}.api.prompt_encoder:open_api",
    engine=f"{_HERE}.engine.encoder_loader:open_vision_loader",
    default="triptych-vision",
    sources=(f"{_HERE}.source:EMBEDDED_VISION",),
    pipelines={"VisionPipeline": f"{_HERE}.api.pipeline"},
    commands=_COMMANDS,
)
