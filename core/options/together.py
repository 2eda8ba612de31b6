"""Options that exclude or need each other.

Owns the rules that no single option's declaration can state.
"""

from __future__ import annotations

import re

from triptych.core.errors import ConfigError
from triptych.core.options.config import Config, ImageOptions, ScheduleOptions, ServerOptions
from triptych.core.options.served_names import ServedNames
from triptych.core.options.speculation import (
    HAVE_FILES,
    MTP,
    NEXTN,
    NGRAM,
    RESIDUAL,
    STANDALONE,
    TYPICAL,
    SpeculationOptions,
)
from triptych.core.process.logs import module_levels

_RELAXED = ("relaxed_topk", "relaxed_delta")
_MATCHES = (
    "speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size",
)
_OF_DRAFTS = (
    *("num_speculative_tokens", "rejection_sampling_strategy"),
    *("use_relaxed_acceptance_for_thinking", *_RELAXED),
    *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
)
_ROOT_PATH = re.compile(r"(?:/[\w.~-]+)+")


def check_together(config: Config) -> None:
    """Check options against each other. Raises `ConfigError`."""
    server, models = config.server, config.models
    if server.headless and server.external_engine:
        raise ConfigError(
            "--headless (engine only) and --external-engine (API only) exclude each other;"
            " start two processes with one each."
        )
    if (server.headless or server.external_engine) and not server.zmq_endpoint_base:
        flag = "--headless" if server.headless else "--external-engine"
        raise ConfigError(
            f"{flag} needs --zmq-endpoint-base, the folder of the sockets between engine and API."
        )
    module_levels(server.log_module_level)
    ServedNames.read(models)
    _check_tls(server)
    _check_dumps(config)
    if server.root_path and not _ROOT_PATH.fullmatch(server.root_path):
        raise ConfigError(
            f"--root-path {server.root_path}: begin it with a slash and end it without, as in /llm."
        )
    _check_caches(config.images)
    _check_chunks(config.schedule)
    _check_matches(config.speculation)
    _check_draft_model(config.speculation)
    _check_acceptance(config.speculation)


def _check_chunks(schedule: ScheduleOptions) -> None:
    """Check that limits of prompt chunks come with chunks."""
    names = ("long_prefill_token_threshold", "max_num_partial_prefills")
    idle = [name for name in names if getattr(schedule, name)]
    if idle and not schedule.enable_chunked_prefill:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ConfigError(
            f"{flags} {'limit' if idle[1:] else 'limits'} prompt chunks, of which"
            " --no-enable-chunked-prefill makes none: leave one of them out."
        )


def _check_dumps(config: Config) -> None:
    replicas = config.replicas
    if config.server.crash_dump_folder and (replicas.replicas != "1" or replicas.ray_address):
        raise ConfigError(
            "--crash-dump-folder is for one engine on this machine, not for --replicas or"
            " --ray-address: leave one of them out."
        )


def _check_tls(server: ServerOptions) -> None:
    if not server.ssl_certfile and (server.ssl_keyfile or server.ssl_cert_reqs):
        flag = "--ssl-keyfile" if server.ssl_keyfile else "--ssl-cert-reqs"
        raise ConfigError(f"{flag} needs --ssl-certfile, the certificate of the server.")
    if bool(server.ssl_ca_certs) != bool(server.ssl_cert_reqs):
        raise ConfigError(
            "--ssl-ca-certs, the authorities of client certificates, and --ssl-cert-reqs 1 or 2"
            " take effect only together."
        )


def _check_caches(images: ImageOptions) -> None:
    """Check that at most one step cache is chosen; FBCache can extrapolate with TaylorSeer."""
    chosen = {images.step_cache} - {"auto"}
    chosen |= {"teacache"} if images.teacache else set()
    chosen |= {"first-block"} if images.first_block_caching else set()
    chosen |= {"taylorseer"} if images.taylorseer and not images.first_block_caching else set()
    if len(chosen) > 1:
        raise ConfigError(
            f"only one step cache can be set, not {' and '.join(sorted(chosen))}: choose one with"
            " --step-cache (--first-block-caching and --taylorseer can be combined)."
        )


def _check_matches(speculation: SpeculationOptions) -> None:
    """Check that the least match of a draft is no longer than the longest."""
    least = speculation.speculative_ngram_min_match_window_size
    most = speculation.speculative_ngram_max_match_window_size
    if least > most:
        raise ConfigError(
            f"--speculative-ngram-min-match-window-size {least} is above"
            f" --speculative-ngram-max-match-window-size {most}: lower the one, or raise the other."
        )


def _check_draft_model(speculation: SpeculationOptions) -> None:
    """Check that a model that drafts is named where one is to draft, and only there."""
    algorithm = speculation.speculative_algorithm
    is_wanted = algorithm in HAVE_FILES
    if is_wanted and not speculation.draft_model_path:
        what = "model" if algorithm == STANDALONE else "head"
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs --draft-model-path, the {what} that drafts."
        )
    if speculation.draft_model_path and not is_wanted:
        raise ConfigError(
            "--draft-model-path takes effect with --speculative-algorithm"
            f" {', '.join(HAVE_FILES[:-1])} or {HAVE_FILES[-1]} only: add one of these, or leave"
            " the model out."
        )


def _check_acceptance(speculation: SpeculationOptions) -> None:
    """Check that options of drafts come with drafts, and that each has what it needs."""
    algorithm, strategy = speculation.speculative_algorithm, speculation.rejection_sampling_strategy
    if algorithm in (*HAVE_FILES, MTP, NEXTN) and strategy == RESIDUAL:
        raise ConfigError(
            "--rejection-sampling-strategy residual: it keeps the distribution but not the tokens"
            f" of a seed, as answers do here; write {TYPICAL}, or leave it out."
        )
    for name in (*_OF_DRAFTS, *_MATCHES):
        needs = _lacks(speculation, name)
        if needs and _is_changed(speculation, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} takes effect with {needs} only: add this, or leave it out.")


def _lacks(speculation: SpeculationOptions, name: str) -> str:
    """The option without which an option of drafts has no effect, if that is absent."""
    algorithm = speculation.speculative_algorithm
    if name in _MATCHES:
        return "" if algorithm == NGRAM else f"--speculative-algorithm {NGRAM}"
    if algorithm == "none":
        return "--speculative-algorithm"
    is_relaxed = speculation.use_relaxed_acceptance_for_thinking or name not in _RELAXED
    return "" if is_relaxed else "--use-relaxed-acceptance-for-thinking"


def _is_changed(speculation: SpeculationOptions, name: str) -> bool:
    return bool(getattr(speculation, name) != getattr(SpeculationOptions(), name))
