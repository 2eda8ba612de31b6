"""Variables that Kubernetes sets for a Service are ignored by their form; others stay errors."""

import os
import subprocess
import sys

import pytest

from triptych.core.errors import ConfigError
from triptych.core.options.service_links import service_links
from triptych.core.options.table import declared, resolve

LINKS = {
    "TRIPTYCH_SERVICE_HOST": "10.96.0.12",
    "TRIPTYCH_SERVICE_PORT": "80",
    "TRIPTYCH_SERVICE_PORT_HTTP": "80",
    "TRIPTYCH_PORT": "tcp://10.96.0.12:80",
    "TRIPTYCH_PORT_80_TCP": "tcp://10.96.0.12:80",
    "TRIPTYCH_PORT_80_TCP_PROTO": "tcp",
    "TRIPTYCH_PORT_80_TCP_PORT": "80",
    "TRIPTYCH_PORT_80_TCP_ADDR": "10.96.0.12",
    "TRIPTYCH_METRICS_SERVICE_HOST": "10.96.0.13",
    "TRIPTYCH_METRICS_PORT": "tcp://[fd00::1]:9090",
    "TRIPTYCH_METRICS_PORT_9090_UDP_ADDR": "fd00::1",
}


def test_variables_of_a_service_change_nothing() -> None:
    assert resolve(environ=LINKS) == resolve(environ={})
    assert service_links({**LINKS, "TRIPTYCH_SEED": "1", "PATH": "/bin"}) == sorted(LINKS)


def test_options_are_still_read_from_the_environment() -> None:
    config = resolve(environ={**LINKS, "TRIPTYCH_PORT": "8080", "TRIPTYCH_HOST": "::"})
    assert (config.server.host, config.server.port) == ("::", 8080)


def test_no_option_has_the_form_of_such_a_variable() -> None:
    assert not service_links({option.variable: "1" for option in declared().values()})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TRIPTYCH_PORT", "tcp:/10.0.0.1"),
        ("TRIPTYCH_PORT", "eighty"),
        ("TRIPTYCH_SERVICE", "x"),
        ("TRIPTYCH_SERVICE_HOSTS", "x"),
        ("TRIPTYCH_PORT_X_TCP", "1"),
    ],
)
def test_other_variables_are_still_errors(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        resolve(environ={variable: value})


def test_the_command_starts_in_a_pod() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "config", "--changed"],
        env={**os.environ, **LINKS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
