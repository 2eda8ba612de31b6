"""Chat and completion: models that write text.

Owns how such a model is recognized, and the modules of its API half and its engine half. Loads
neither.
"""

from __future__ import annotations

from triptych.core.options.command import Command
from triptych.modalities.modality import Modality

_HERE = "triptych.modalities.llm"
_COMMANDS = (
    Command(
        "generate",
        "Answer a batch of prompts, from arguments or JSONL to JSONL.",
        f"{_HERE}.api.generate_cli",
        (
            'triptych generate "One." "Two." --temperature 0',
            "triptych generate --input prompts.jsonl --output answers.jsonl",
        ),
        operands="[PROMPT ...]",
    ),
    Command(
        "bench",
        "Measure any OpenAI-compatible server, or two side by side.",
        f"{_HERE}.api.bench.cli",
        (
            "triptych bench --concurrency 8 --prompt-tokens 256 --output-tokens 64",
            "triptych bench --rate 4 --num-requests 200 --shared-prefix-tokens 1500",
            "triptych bench --rate 1,2,4,8 --goodput ttft:500 itl:50 --output sweep.json",
            "triptych bench --dataset sharegpt.json --concurrency 16",
            "triptych bench --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --repeats 5",
        ),
    ),
)

CHAT = Modality(
    role="chat",
    task=("chat", "chats", "/v1/chat/completions"),
    matches=lambda folder, config: True,  # a model that no other modality recognizes
    wire=(
        "triptych.core.engine_api.tokens:TextJob",
        "triptych.core.engine_api.tokens:TokenDelta",
    ),
    api=f"{_HERE}.api.routes:open_api",
    engine=f"{_HERE}.engine.loader:LlmLoader",
    default="embedded",
    sources=(f"{_HERE}.source:QWEN_CODER",),
    more_roles=("embedding",),  # texts go to chat models on the same route
    pipelines={"ChatPipeline": f"{_HERE}.api.pipeline"},
    commands=_COMMANDS,
)
