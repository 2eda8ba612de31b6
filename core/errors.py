"""The one exception tree, with the HTTP status and code of each error.

Owns every error a caller can meet. Knows nothing about FastAPI, sockets or torch.

    TriptychError
    |-- RequestError (ValueError)   the caller's request is wrong: 4xx
    |-- Unavailable                 a valid request at the wrong time: 429 or 503
    |-- JobFailed                   the engine could not finish this job
    `-- SetupError (ValueError)     cannot start: one actionable line, exit code != 0
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import msgspec

IGNORED_HEADER = "x-triptych-ignored"
"""Response header that lists the fields of a request that were ignored."""


class TriptychError(Exception):
    """Root of the tree. `message` says what to do; it never holds a path, address or traceback."""

    status = 500
    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(TriptychError, ValueError):
    """The caller's request is wrong; sending it again unchanged cannot succeed."""

    status, code = 400, "invalid_request"


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""


class EmptyBuffer(RequestError):
    """A commit of sound in which there is no turn. The code is OpenAI's."""

    code = "input_audio_buffer_commit_empty"


class UnsupportedOption(RequestError):
    """The option is known but not offered; the message names the alternative."""

    code = "unsupported_option"


class ContextLengthExceeded(RequestError):
    """Prompt and requested output do not fit the model's context."""

    code = "context_length_exceeded"


class TemplateFailed(RequestError):
    """The model's chat template was stopped: it took too much time or memory."""

    code = "chat_template_failed"


class WrongModel(RequestError):
    """The model is served here for another task; the message names its route."""

    code = "wrong_model"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status, code = 401, "invalid_api_key"


class AdminKeyRequired(RequestError):
    """The request changes the server, and its key is not one of `--admin-key`."""

    status, code = 403, "admin_key_required"


class ForeignSite(RequestError):
    """A web page of another site calls a server without API keys."""

    status, code = 403, "foreign_site"


class NotFound(RequestError):
    """No such job, image, voice or route."""

    status, code = 404, "not_found"


class ModelRefused(RequestError):
    """A model that was asked for by name cannot be served here; the message says why."""

    status, code = 422, "model_refused"


class UnknownModel(NotFound):
    """There is no model called `name` of the requested kind."""

    code = "model_not_found"
    name = ""

    @classmethod
    def among(cls, known: Iterable[str], name: str, kind: str = "model") -> Self:
        """Build the error; `known` are the models of that kind."""
        names = ", ".join(known) or "none"
        named = f" {name[:80]!a}" if name else ""
        error = cls(
            f"There is no {kind}{named} here. {kind.capitalize()}s: {names}.",
            param="model",
        )
        error.name = name
        return error


class MethodNotAllowed(RequestError):
    """The route exists, but not for this method."""

    status, code = 405, "method_not_allowed"


class RequestTimeout(RequestError):
    """The request did not arrive or was not answered in time."""

    status, code = 408, "request_timeout"


class Conflict(RequestError):
    """The request contradicts the state of the server, such as a name that is taken."""

    status, code = 409, "conflict"


class PayloadTooLarge(RequestError):
    """The body or a part of it exceeds a limit."""

    status, code = 413, "payload_too_large"


class StoreFull(RequestError):
    """A document does not fit into the store, even after evicting all that may be evicted."""

    status, code = 413, "store_full"


class UnsupportedMedia(RequestError):
    """The route does not read this content type."""

    status, code = 415, "unsupported_media_type"


class UpgradeRequired(RequestError):
    """The route is a WebSocket, and the request does not open one."""

    status, code = 426, "upgrade_required"


class HeadersTooLarge(RequestError):
    """The request's headers exceed the limit."""

    status, code = 431, "headers_too_large"


class Unavailable(TriptychError):
    """A valid request at the wrong time; `retry_after_s` says when to retry."""

    status, code = 503, "unavailable"


class RateLimited(Unavailable):
    """This key has too much work in flight."""

    status, code = 429, "rate_limit_exceeded"


class Overloaded(Unavailable):
    """The server as a whole has too much work in flight."""

    code = "overloaded"


class EngineDown(Unavailable):
    """The engine has crashed, hangs or is restarting."""

    code = "engine_down"


class Asleep(Unavailable):
    """The models are out of memory until the server is woken."""

    code = "asleep"


class Draining(Unavailable):
    """The server is shutting down and accepts no new work."""

    code = "draining"


class JobFailed(TriptychError):
    """The engine could not finish this job; other jobs continue."""

    status, code = 500, "job_failed"


class NonFinite(JobFailed):
    """The model produced NaN or infinity for this job."""

    code = "non_finite"


class OutOfMemory(JobFailed):
    """A step for this job did not fit in device memory, even alone."""

    status, code = 503, "out_of_memory"


class SlowReader(JobFailed):
    """The client stopped reading its stream for too long."""

    status, code = 408, "slow_reader"


class InternalError(JobFailed):
    """A fault of the server; details are in its log under the request id."""

    code = "internal_error"


class SetupError(TriptychError, ValueError):
    """The process cannot start; the message is one actionable line."""

    code = "setup_error"


class ConfigError(SetupError):
    """An option or its file is invalid."""

    code = "config_error"


class WeightsError(SetupError):
    """A checkpoint is damaged, incomplete or unsupported; names the file and the tensor."""

    code = "weights_error"


class BundleError(SetupError):
    """A bundle of `triptych warm-cache` is damaged, untrusted, or for other models or devices."""

    code = "bundle_error"


class MemoryBudgetExceeded(SetupError):
    """A reservation does not fit the ledger; the message lists the owners of reserved memory."""

    code = "memory_budget_exceeded"


class ModelTooLarge(MemoryBudgetExceeded):
    """A model does not fit even without other models; the message says which option to set.

    It holds only the model's name and sizes, so clients also see it. `context_that_fits` is the
    context in tokens with which it would fit; 0 if no context would, or none is known.
    """

    status, code = 503, "model_too_large"
    context_that_fits = 0


class DamagedWeights(WeightsError):
    """Converted weight files were damaged after their creation; their source may still exist."""

    code = "damaged_weights"


class DeviceError(SetupError):
    """The requested device does not exist or cannot be used."""

    code = "device_error"


class RankLost(DeviceError):
    """One rank of a model failed or exited; all ranks restart."""

    code = "rank_lost"


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it crosses a process boundary."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


def _tree(root: type[TriptychError]) -> list[type[TriptychError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


BY_CODE: dict[str, type[TriptychError]] = {cls.code: cls for cls in _tree(TriptychError)}
"""Error class of each code; a child takes precedence over a parent with the same code."""


def to_info(error: BaseException) -> ErrorInfo:
    """Describe `error` for the wire; anything outside the tree becomes an `internal_error`."""
    if not isinstance(error, TriptychError):
        return ErrorInfo(code=InternalError.code, message="An internal error occurred.")
    return ErrorInfo(
        code=error.code,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )


def from_info(info: ErrorInfo) -> TriptychError:
    """Rebuild the exception that `to_info` described."""
    cls = BY_CODE.get(info.code, InternalError)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s)
