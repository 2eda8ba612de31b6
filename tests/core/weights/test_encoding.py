"""Which matrices are held in blocks, and of which format."""

import pytest

from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.encoding import MIN_BLOCK_BYTES, WeightEncoding, plain_type
from triptych.core.weights.layout import TensorInfo

STORED = {
    "a": TensorInfo("a", (2, 256), "U8", "x", "q4_k"),
    "b": TensorInfo("b", (2, 256), "U8", "x", "q6_k"),
    "norm": TensorInfo("norm", (256,), "BF16", "x"),
}
PLAIN = {"a": TensorInfo("a", (2, 256), "BF16", "x")}


def held(encoding: WeightEncoding, name: str, num_inputs: int, **kind: bool) -> str | None:
    form = encoding.format_of(name, num_inputs, **kind)
    return form and form.name


@pytest.mark.parametrize("wanted", ["q4_k", "q6_k"])
def test_a_mixed_file_stays_as_it_is(wanted: str) -> None:
    encoding = WeightEncoding.of(wanted, STORED)
    assert [held(encoding, name, 256) for name in ("a", "b", "c")] == ["q4_k", "q6_k", None]


def test_large_files_stay_in_blocks_and_small_ones_do_not() -> None:
    assert held(WeightEncoding.of("auto", STORED), "a", 256) is None
    large = {"a": TensorInfo("a", (2**22, 256), "U8", "x", "q4_k")}
    assert large["a"].num_bytes > MIN_BLOCK_BYTES
    assert held(WeightEncoding.of("auto", large), "a", 256) == "q4_k"
    assert held(WeightEncoding.of("auto", STORED, "gptq"), "a", 256) == "q4_k"


def test_plain_types_take_blocks_apart() -> None:
    assert held(WeightEncoding.of("bfloat16", STORED), "a", 256) is None


def test_a_file_of_other_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="q8_0: this model's weights are q4_k, q6_k"):
        WeightEncoding.of("q8_0", STORED)


@pytest.mark.parametrize(
    ("wanted", "num_inputs", "inner", "vocabulary"),
    [
        ("auto", 256, None, None),
        ("q8_0", 256, "q8_0", "q8_0"),
        ("q8_0", 48, None, None),
        ("q4_0", 576, "q4_0", "q8_0"),
        ("q4_k", 512, "q4_k", "q6_k"),
        ("q4_k", 576, "q5_0", "q8_0"),
        ("q6_k", 576, "q8_0", "q8_0"),
    ],
)
def test_made_at_load(
    wanted: str, num_inputs: int, inner: str | None, vocabulary: str | None
) -> None:
    encoding = WeightEncoding.of(wanted, PLAIN)
    assert held(encoding, "a", num_inputs) == inner
    assert held(encoding, "a", num_inputs, is_vocabulary=True) == vocabulary


def test_the_type_of_activations() -> None:
    def of(dtype: str, encoding: str, *, takes_blocks: bool = True) -> str:
        options = ModelOptions(dtype=dtype, quantization_encoding=encoding)
        return plain_type(options, takes_blocks=takes_blocks)

    assert of("auto", "auto") == "auto"
    assert of("auto", "float32") == of("float32", "float32") == of("float32", "q8_0") == "float32"
    assert of("auto", "q8_0") == "auto"
    with pytest.raises(ConfigError, match="conflict"):
        of("float32", "bfloat16")
    with pytest.raises(ConfigError, match="q8_0 is for image models, and for text"):
        of("auto", "q8_0", takes_blocks=False)
