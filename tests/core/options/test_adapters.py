"""The forms of `--lora-paths`."""

from __future__ import annotations

import pytest

from triptych.core.errors import ConfigError
from triptych.core.options.adapters import AdapterOptions, AdapterPlace

FORMS = {
    "x=a": AdapterPlace("x", "a"),
    "b/y.safetensors": AdapterPlace("y", "b/y.safetensors"),
    '{"name": "z", "path": "c", "base_model_name": "m"}': AdapterPlace("z", "c", "m"),
    '{"lora_name": "w", "lora_path": "d"}': AdapterPlace("w", "d"),
}


def test_the_forms_of_other_servers_name_an_adapter_too() -> None:
    assert AdapterOptions(lora_paths=tuple(FORMS)).places() == list(FORMS.values())
    assert AdapterOptions(lora_paths=tuple(FORMS), enable_lora=False).places() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_paths": ("x=a", "b/x.safetensors")}, "Two adapters are called 'x'"),
        ({"lora_paths": ('{"name": "x"}',)}, "is not an adapter"),
        ({"lora_paths": ('{"lora_name": "x", "lora_path": "a", "pinned": true}',)}, "pinned"),
    ],
)
def test_wrong_forms_and_limits_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdapterOptions(**options).places()  # type: ignore[arg-type]
