"""Values out of range name their field."""

from typing import Any

import pytest

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest


@pytest.mark.parametrize(
    "given", [{"logit_bias": ((9, 1.0),)}, {"stop_token_ids": (9,)}, {"top_p": 2.0}]
)
def test_a_value_out_of_range_names_its_field(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**given).validate(9)
    assert [caught.value.param] == [*given]
