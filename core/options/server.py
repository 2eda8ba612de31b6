"""Options of the HTTP server: where it listens, who may call, and what a request may be.

Owns the declarations; `core.http` and `triptych.serve` read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.options.declaration import BOUND, COUNT, DURATION, Range, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The HTTP server and its processes."""

    host: str = option("127.0.0.1", "Address to listen on.", is_for_server=True)
    port: int = option(
        8000, "Port to listen on.", within=Range(low=0, high=65535), is_for_server=True
    )
    api_key: tuple[str, ...] = option(
        (), "Accepted API key; repeat for several.", is_for_server=True
    )
    api_key_file: str = option("", "File with one accepted API key per line.", is_for_server=True)
    cors_origin: tuple[str, ...] = option(
        (), "Origin allowed to call from a browser.", is_for_server=True
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Name under which a server without API keys may be asked; repeat for several. Addresses,"
        " names without a dot and those of private networks always may.",
        aliases=("--allowed-hosts",),
        is_for_server=True,
    )
    page: bool = option(
        True,
        "A page for browsers at `/`, and the API reference at `/docs`. They need no key.",
        is_for_server=True,
    )
    max_request_bytes: int = option(
        4 * 2**20,
        "Largest request body, files in it not counted.",
        within=COUNT,
        is_for_server=True,
    )
    max_image_request_bytes: int = option(
        64 * 2**20,
        "Largest body of a chat with the images in it, as data URLs (4/3 of a file's size).",
        within=COUNT,
        roles=("vision",),
        is_for_server=True,
    )
    max_upload_bytes: int = option(
        26 * 2**20, "Largest form with a file in it, such as sound to transcribe.", within=COUNT
    )
    num_decode_children: int = option(
        2,
        "Limited processes (25 MiB each, started when needed) that decode uploaded files.",
        within=COUNT,
    )
    max_voices_per_key: int = option(
        32, "Voices that one API key may make from recordings.", within=BOUND, roles=("speech",)
    )
    max_voices: int = option(
        1024, "Voices made from recordings that are kept in all.", within=BOUND, roles=("speech",)
    )
    media_domains: tuple[str, ...] = option(
        (),
        "A host that images may be fetched from when a request names their URL; `*.` in front:"
        " all below it, `*`: any. Repeat for several. With none, nothing is fetched.",
        aliases=("--allowed-media-domains",),
        roles=("vision",),
    )
    media_timeout_s: float = option(
        5.0, "Longest time that fetching one image may take.", within=DURATION, roles=("vision",)
    )
    public_url: str = option(
        "",
        "Address under which clients reach this server, for links to images; empty: the one that"
        " a request came to.",
        roles=("image",),
        is_for_server=True,
    )
    request_timeout_s: float = option(
        600.0, "Longest time one request may take.", within=DURATION, is_for_server=True
    )
    stream_timeout_s: float = option(
        30.0, "How long a client may stop reading its stream.", within=DURATION, is_for_server=True
    )
    heartbeat_s: float = option(
        15.0,
        "A comment is sent after so many silent seconds of a stream.",
        within=DURATION,
        is_for_server=True,
    )
    drain_timeout_s: float = option(
        30.0, "How long SIGTERM waits for requests in flight.", within=BOUND, is_for_server=True
    )
    enable_tokenizer_info_endpoint: bool = option(
        False,
        "Show tokenizer configurations and chat templates at `/tokenizer_info`.",
        is_for_server=True,
    )
    share_prefix_across_keys: bool = option(
        False,
        "Let different API keys reuse each other's cached prompts (a timing side channel).",
        is_for_server=True,
    )
    zmq_endpoint_base: str = option(
        "", "Folder for the engine's sockets; empty: a private temporary one.", is_for_server=True
    )
    headless: bool = option(False, "Run the engine without an API process.", is_for_server=True)
    external_engine: bool = option(
        False, "Run the API without an engine of its own (see headless).", is_for_server=True
    )
    log_level: str = option(
        "info", "Least serious log lines shown.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "Log lines as text or JSON.", choices=("text", "json"))
    log_prompts: bool = option(
        False,
        "Write prompts and answers to the log.",
        roles=("chat", "vision", "speech", "asr", "image"),
        is_for_server=True,
    )
    min_stall_budget_s: float = option(
        10.0,
        "An engine that is silent for longer than this (and 20 slow steps) is restarted. Beside the"
        " first step of each kind, whose length nobody knows, it beats for nine times as long: a"
        " process that stands still is noticed all the same, such a step that hangs only then.",
        aliases=("--watchdog-timeout",),
        within=DURATION,
    )
