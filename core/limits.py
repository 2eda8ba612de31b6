"""All fixed limits of requests.

Owns the numbers. They limit the cost of one request before admission. Limits of a model (its
context, its vocabulary) are lower and are checked later.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# The wire
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
MAX_FRAMING_BYTES = 64 * 1024
"""Chunk sizes, extensions and trailers of one body."""
MAX_DISCARDED_BYTES = 64 * 2**20
"""Bytes that are still read and discarded after an early answer. A client that sends its whole body
before it reads receives the answer if the body is no larger."""
MAX_REQUESTS_PER_CONNECTION = 10_000
MAX_CONNECTIONS = 4096
HEAD_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 15.0
MAX_REQUEST_ID_CHARS = 128

# JSON
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 2**17
"""Objects and arrays of one body: a million empty ones take a second to parse."""
MAX_JSON_FIELDS = 2048
"""Fields of one JSON object."""

# Forms
MAX_FORM_PARTS = 64
MAX_FORM_FIELD_BYTES = 64 * 1024
"""One field that is not a file."""
MAX_FORMS_HELD = 16
"""Forms of the maximum size that all requests together may hold in memory."""
MAX_PART_HEADERS = 8
MAX_PART_HEADER_BYTES = 4096

# Text and arrays
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 4 * 2**20
MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_CONVERSATION_PARTS = 2**14
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_OPTIONS = 16
MAX_PROMPTS = 512
MAX_EMBEDDING_INPUTS = 2048
MAX_DIMENSIONS = 2**16
MAX_SCORED_PAIRS = 2048
MAX_INSTRUCTION_CHARS = 4096
MAX_GRAMMAR_BYTES = 256 * 1024
"""A JSON schema, regular expression or grammar that constrains an answer."""
MAX_CHOICES = 4096
MAX_ROWS = 512
"""Prompts times samples of one request."""
MAX_PROMPT_TOKENS = 2**20
MAX_HELD_IMAGE_BYTES = 2**30
"""Preprocessed images of all chats in progress, counted once per sample."""
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 2**31 - 1

# Files and batches
MAX_FILES_LISTED = 10_000
MAX_FILE_LIFETIME_S = 30 * 86400
MIN_FILE_LIFETIME_S = 3600
MAX_BATCHES_LISTED = 100
MAX_BATCH_LINES = 50_000
MAX_ACTIVE_BATCHES = 64
"""Batches of one caller that are waiting or running."""
MAX_BATCH_WINDOW_S = 7 * 86400

# Sampling
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ABS_LOGIT_BIAS = 100
MAX_SEED = 2**63 - 1

SAMPLING_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 2.0),
        "top_p": (0.0, 1.0),
        "top_k": (0, 2**31 - 1),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.0, 10.0),
        "frequency_penalty": (-2.0, 2.0),
        "presence_penalty": (-2.0, 2.0),
        "min_tokens": (0, 2**31 - 1),
        "max_tokens": (1, 2**31 - 1),
        "seed": (-MAX_SEED, MAX_SEED),
        "sample_index": (0, MAX_SAMPLES - 1),
        "top_logprobs": (0, MAX_LOGPROBS),
    }
)
"""Lowest and highest allowed value of each sampling parameter."""
