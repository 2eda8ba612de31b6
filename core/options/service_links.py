"""Variables that Kubernetes sets in every pod for a Service named `triptych` or `triptych-...`.

Owns their form. They are no options: Kubernetes names them after the Service, with the prefix of
our variables. Reference: https://kubernetes.io/docs/concepts/services-networking/service
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from triptych.core.options.declaration import ENVIRONMENT_PREFIX

_SERVICE = rf"{ENVIRONMENT_PREFIX}(?:[A-Z0-9_]+_)?"
_BY_NAME = re.compile(
    rf"{_SERVICE}(?:SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)"
    r"|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_BY_VALUE = re.compile(rf"{_SERVICE}PORT")
_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://\S+")


def is_service_link(variable: str, text: str) -> bool:
    """Whether `variable` with this value has the form of one that Kubernetes sets."""
    if _BY_NAME.fullmatch(variable):
        return True
    return bool(_BY_VALUE.fullmatch(variable) and _ADDRESS.fullmatch(text))


def service_links(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of `environ` that are ignored for their form."""
    return sorted(name for name, text in environ.items() if is_service_link(name, text))
