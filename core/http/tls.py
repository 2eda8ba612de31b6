"""HTTPS: the TLS context of the server, and the scheme of its addresses.

Owns reading certificates and keys. Imports no web framework: the supervisor checks the files before
anything slow starts. The API process opens them again, so keys pass through no other process.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from triptych.core.errors import ConfigError
from triptych.core.options.config import ServerOptions


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the context of the configured certificate; `None` without one.

    Raises `ConfigError` for files that cannot be read or do not match.
    """
    if not options.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = _path("--ssl-certfile", options.ssl_certfile)
    key = _path("--ssl-keyfile", options.ssl_keyfile) if options.ssl_keyfile else None
    try:
        # A password of some kind: OpenSSL asks for a missing one on the terminal.
        context.load_cert_chain(certificate, key, options.ssl_keyfile_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(_explain(error, key or certificate)) from error
    if options.ssl_ca_certs:
        authorities = _path("--ssl-ca-certs", options.ssl_ca_certs)
        try:
            context.load_verify_locations(authorities)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError("--ssl-ca-certs holds no certificates in PEM format.") from error
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    return context


def scheme_of(options: ServerOptions) -> str:
    """Return the scheme of the server's addresses."""
    return "https" if options.ssl_certfile else "http"


def _path(flag: str, text: str) -> Path:
    path = Path(text).expanduser()
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise ConfigError(f"{flag} {text}: cannot be read ({error.strerror}).") from error


def _explain(error: OSError, key: Path) -> str:
    """Return the cause of a certificate and key that OpenSSL does not accept."""
    if "KEY_VALUES_MISMATCH" in (getattr(error, "reason", None) or ""):
        return "--ssl-keyfile is not the key of the certificate in --ssl-certfile."
    if b"ENCRYPTED" in key.read_bytes():
        return f"{key.name} is encrypted: set --ssl-keyfile-password to its password."
    return (
        "--ssl-certfile and --ssl-keyfile do not hold a certificate and its private key in PEM"
        " format. Leave --ssl-keyfile out if one file holds both."
    )
