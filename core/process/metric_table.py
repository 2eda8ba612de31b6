"""Every metric family of the server: name, type, labels and meaning.

Owns the help texts of `/metrics` and the tables of docs/metrics.md. Knows no values. Families of an
engine also have the label `replica` where there are several; `process_*` are the names that
Prometheus' client libraries share.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class MetricFamily(NamedTuple):
    """A family. `name` has the suffix `_total` of counters."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


def _families(kind: Kind, labels: str, **helps: str) -> tuple[MetricFamily, ...]:
    names = tuple(labels.split())
    return tuple(MetricFamily(name, kind, names, text) for name, text in helps.items())


def _engine(kind: Kind, **helps: str) -> tuple[MetricFamily, ...]:
    """Families that an engine's schedulers report, by model."""
    named = {f"triptych_{name}": text for name, text in helps.items()}
    return _families(kind, "model", **named)


def _transfers(prefix: str, subject: str) -> tuple[MetricFamily, ...]:
    """The families of connections between engines that send `subject`."""
    gauges = {
        f"{prefix}page_links": f"Open connections to other engines for {subject}.",
        f"{prefix}page_bytes": f"Size of a page of {subject} in transfer.",
    }
    counters = {
        f"{prefix}pages_sent_total": f"Pages of {subject} sent to other engines.",
        f"{prefix}pages_received_total": f"Pages of {subject} received from other engines.",
        f"{prefix}page_sent_bytes_total": f"Bytes of {subject} sent to other engines.",
        f"{prefix}page_received_bytes_total": f"Bytes of {subject} received from other engines.",
    }
    return (*_engine("gauge", **gauges), *_engine("counter", **counters))


GROUPS: Mapping[str, tuple[MetricFamily, ...]] = MappingProxyType(
    {
        "Requests": (
            *_families(
                "counter",
                "route status model",
                triptych_http_requests_total="Requests that ended, by route template, status and"
                " model (empty without one). Status 499: the client left.",
            ),
            *_families(
                "histogram",
                "route status model",
                triptych_http_request_seconds="Time from a request's headers to the end of its"
                " response.",
            ),
            *_families("gauge", "", triptych_http_requests_in_flight="Requests in progress."),
            *_families(
                "histogram",
                "model",
                triptych_time_to_first_token_seconds="Time from a request to the first token of"  # noqa: S106
                " each of its samples.",
                triptych_inter_token_seconds="Time between tokens of one sample.",  # noqa: S106
                triptych_time_to_first_audio_seconds="Time from a request to its first audio.",
                triptych_image_seconds="Time from a request to each of its finished images.",
            ),
            *_families(
                "histogram",
                "model reason",
                triptych_job_wait_seconds="Time that a job waited, by reason: load (of its model),"
                " queue, preempted, slow_reader. One observation for each job that waited.",
            ),
            *_families("counter", "model", triptych_audio_seconds_total="Seconds of audio sent."),
        ),
        "Engine": (
            *_families(
                "gauge",
                "",
                triptych_engine_alive="1 while the engine's loop makes progress or the engine is"
                " being restarted, 0 while it hangs.",
                triptych_engine_ready="1 while requests are accepted, else 0.",
                triptych_engine_beat_age_seconds="Time since the engine's last heartbeat.",
                triptych_replicas_ready="Replicas that accept requests; only with replicas.",
            ),
            *_families(
                "counter",
                "",
                triptych_engine_restarts_total="Restarts of the engine since the server's start;"
                " with replicas, replicas that ended.",
            ),
            *_families(
                "histogram",
                "model kind",
                triptych_step_seconds="Device time of a step, by its kind: prefill, decode, mixed,"
                " encode, denoise, audio and others. The rate of the sum is the share of time in"
                " which the device is busy.",
            ),
            *_families(
                "counter",
                "model kind",
                triptych_failed_steps_total="Steps that raised an error.",
            ),
            *_families(
                "gauge",
                "device",
                triptych_device_info="1; the label is the engine's device.",
            ),
            *_families(
                "gauge",
                "",
                triptych_device_memory_budget_bytes="Device memory that all models may use.",
            ),
            *_families(
                "gauge",
                "owner",
                triptych_device_memory_bytes="Device memory in use, by owner: MODEL/weights,"
                " MODEL/kv and others.",
            ),
        ),
        "Models and queues": (
            *_engine(
                "counter",
                model_loads_total="Loads of a model that succeeded.",
                model_load_failures_total="Loads of a model that failed.",
                model_unloads_total="Times that a model was unloaded: idle, or for another one.",
            ),
            *_engine(
                "gauge",
                jobs_waiting="Jobs that have not begun.",
                jobs_running="Jobs that have begun.",
                jobs_paused="Jobs whose readers are slow.",
                job_seconds="Mean device time of recent jobs.",
                backlog_seconds="Predicted device time of all open jobs.",
            ),
        ),
        "Tokens and KV cache": (
            *_engine(
                "counter",
                prompt_tokens_total="Tokens of prompts that have begun.",
                cached_tokens_total="Prompt tokens found in the prefix cache.",
                output_tokens_total="Tokens generated; codes, for speech models.",
                draft_tokens_total="Tokens that speculative decoding drafted.",
                accepted_draft_tokens_total="Drafted tokens that were accepted.",
                preemptions_total="Sequences whose pages were taken for others; they are computed"
                " again.",
                non_finite_total="Sequences ended because the model computed no finite values.",
                kv_page_hits_total="Cache pages that were found and used again.",
                kv_page_evictions_total="Cached pages evicted for new ones.",
                kv_host_page_hits_total="Cache pages that came back from host memory.",
                kv_disk_page_hits_total="Cache pages that came back from disk.",
                kv_host_page_evictions_total="Cache pages that gave way in host memory.",
                kv_disk_page_evictions_total="Cache pages that gave way on disk.",
                kv_disk_pages_refused_total="Cache pages on disk that were damaged or gone.",
                kv_disk_write_errors_total="Cache pages that could not be written to disk.",
                kv_pages_unsaved_total="Cache pages evicted before a tier had a copy.",
            ),
            *_engine(
                "gauge",
                kv_pages="Pages of the KV cache.",
                kv_pages_leased="Pages that running sequences hold.",
                kv_pages_cached="Pages kept for prefix hits only; they can be evicted.",
                kv_window_pages="Pages of layers with a window, if they have any of their own.",
                kv_window_pages_leased="Pages of layers with a window that sequences hold.",
                kv_host_bytes="Cache pages in host memory, in bytes.",
                kv_disk_bytes="Cache pages on disk, in bytes.",
                token_seconds="Predicted time of a prompt token.",  # noqa: S106
            ),
        ),
        "Vision": (
            *_engine(
                "counter",
                images_encoded_total="Images that the vision encoder computed.",
                vision_cache_hits_total="Images whose features were cached.",
            ),
            *_engine(
                "gauge",
                vision_cache_entries="Images whose features are cached.",
                vision_cache_bytes="Size of all cached image features.",
            ),
        ),
        "Image generation": (
            *_engine(
                "counter",
                images_total="Images generated.",
                image_retries_total="Images planned again after a step ran out of memory.",
                denoise_runs_total="Runs of the denoiser; several images share one.",
                denoise_rows_total="Rows of all runs; divided by the runs, the batch size.",
                denoise_steps_computed_total="Denoising steps that were computed.",
                denoise_steps_skipped_total="Denoising steps that a step cache skipped.",
            ),
            *_engine(
                "gauge",
                images_waiting="Images that have not begun.",
                images_running="Images in progress.",
                image_state_bytes="Device memory that images in progress hold between steps.",
            ),
        ),
        "Speech": (
            *_engine(
                "counter",
                speech_frames_total="Frames of audio decoded.",
                speech_audio_seconds_total="Seconds of audio made.",
                speech_underruns_total="Times that a listener's buffer ran empty.",
                speech_underrun_seconds_total="Seconds for which listeners' buffers were empty.",
                speech_late_starts_total="Streams that began later than --target-first-audio-s.",
                speech_loops_total="Segments ended because the model repeated itself.",
                speech_non_finite_total="Streams ended because the codec computed no finite"
                " samples.",
            ),
            *_engine(
                "gauge",
                speech_streams="Streams that are being spoken.",
                speech_streams_live="Streams with a listener.",
                speech_streams_dry="Streams whose listener's buffer is empty.",
                **{
                    f"speech_streams_buffered_below_{name}": "Streams whose listener has less than"
                    f" {name} of audio."
                    for name in ("100ms", "300ms", "1s", "3s", "10s")
                },
            ),
        ),
        "Embeddings, transcription and other work in stages": (
            *_engine(
                "counter",
                stages_total="Stages computed: rows of all steps.",
                units_total="Units finished: texts, windows of a recording, sentences.",
            ),
            *_engine("gauge", units_started="Units that have state on the device."),
        ),
        "Engines with roles": (
            *_engine(
                "counter",
                page_fetches_total="Prompts whose pages were requested from another engine.",
                page_fallbacks_total="Prompts computed here because pages did not arrive.",
                page_wait_seconds_total="Time that prompts waited for pages.",
                page_transfers_total="Prompts computed here for another engine.",
                feature_fetches_total="Images requested from an engine that encodes.",
                feature_fallbacks_total="Images encoded here because features did not arrive.",
                feature_wait_seconds_total="Time that prompts waited for image features.",
                feature_transfers_total="Images requested by other engines.",
            ),
            *_transfers("", "KV cache"),
            *_transfers("feature_", "image features"),
        ),
        "Processes": (
            *_families(
                "gauge",
                "version python_version",
                triptych_build_info="1; the labels are the versions of Triptych and of Python.",
            ),
            *_families(
                "gauge",
                "process",
                process_resident_memory_bytes="Resident memory, by process: supervisor, api,"
                " engine, rank (of a model on several devices), helper (decodes media, compiles"
                " grammars). Pages that processes share count for each.",
                process_open_fds="Open file descriptors, by process.",
                process_threads="Threads, by process.",
                process_start_time_seconds="Start of the oldest process of a kind, in Unix time.",
            ),
            *_families(
                "counter",
                "process",
                process_cpu_seconds_total="Processor time of user and system, by process,"
                " including processes that have ended.",
            ),
        ),
    }
)
"""All families by their group in the documentation."""

FAMILIES: Mapping[str, MetricFamily] = MappingProxyType(
    {family.name: family for group in GROUPS.values() for family in group}
)
"""All families by name."""
