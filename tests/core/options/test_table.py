"""Options: precedence, validation, and the words an error uses."""

import argparse
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import ConfigError
from triptych.core.options.config import Config
from triptych.core.options.declaration import Option, Range
from triptych.core.options.speculation import SpeculationOptions
from triptych.core.options.table import (
    SECTIONS,
    Resolved,
    add_model_operands,
    add_options,
    declared,
    describe,
    make_config,
    parse,
    resolve,
    resolve_with_sources,
    value_of,
)


def _parser(*, sections: tuple[str, ...] = SECTIONS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triptych serve", allow_abbrev=False)
    add_options(parser, sections=sections)
    return parser


def _config(*argv: str, environ: dict[str, str] | None = None) -> Config:
    return resolve(parse(_parser(), argv), environ=environ or {})


def _file(folder: Path, text: str) -> str:
    path = folder / "triptych.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_the_default() -> None:
    assert _config() == Config() == make_config({})


def test_field_names_are_unique_over_sections() -> None:
    count = sum(len(getattr(Config(), section).__slots__) for section in SECTIONS)
    assert len(declared()) == count


def test_defaults_are_valid() -> None:
    values = {name: option.default for name, option in declared().items()}
    assert make_config(values) == Config()


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "port: 1\nhost: file\nseed: 1\n")
    environ = {"TRIPTYCH_PORT": "2", "TRIPTYCH_HOST": "environment"}
    args = parse(_parser(), ["--config-file", path, "--port", "3"])
    resolved = resolve_with_sources(args, environ=environ)
    server = resolved.config.server
    assert (server.port, server.host, resolved.config.device.seed) == (3, "environment", 1)
    assert resolved.sources["port"] == "--port"
    assert resolved.sources["host"] == "TRIPTYCH_HOST"
    assert resolved.sources["seed"] == "file triptych.yaml"
    assert resolved.sources["threads"] == "default"


def test_environment_may_name_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "port: 1\n")
    assert resolve(environ={"TRIPTYCH_CONFIG_FILE": path}).server.port == 1


def test_file_takes_sections_flat_names_and_aliases(tmp_path: Path) -> None:
    text = "server: {port: 1}\ndevice: cpu\nmodel-path: [a, b]\nmax_running_requests: 4\n"
    config = _config("--config-file", _file(tmp_path, text))
    assert (config.server.port, config.device.device) == (1, "cpu")
    assert config.models.model == ("a", "b")
    assert config.schedule.max_batch_size == 4


def test_file_may_hold_a_section_and_an_option_of_one_name(tmp_path: Path) -> None:
    config = _config("--config-file", _file(tmp_path, "device: {device: cpu, threads: 2}\n"))
    assert (config.device.device, config.device.threads) == ("cpu", 2)


@pytest.mark.parametrize("text", ["# nothing\n", "server:\ndevice:\n", "server: {}\n"])
def test_empty_file_and_empty_sections_are_the_default(text: str, tmp_path: Path) -> None:
    assert _config("--config-file", _file(tmp_path, text)) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1\n", "file triptych.yaml: prot is not an option; did you mean port?"),
        ("server: {prot: 1}\n", "did you mean port?"),
        ("sever: {port: 1}\n", "unknown section 'sever'"),
        ("port: abc\n", "port: expected a whole number, got 'abc'"),
        ("port: true\n", "expected a whole number, got True"),
        ("port: 1.5\n", "expected a whole number"),
        ("offline: 1\n", "expected true or false"),
        ("host: 12\n", "expected text"),
        ("model: [1]\n", "expected text or a list of texts"),
        ("device_memory_utilization: .nan\n", "must be above 0 and at most 1"),
        ("- port\n", "expected `option: value` lines"),
        ("port: [\n", "invalid YAML"),
        ("port: " + "[" * 20_000, "invalid YAML"),
        ("port: 1\nport: 2\n", "port is given twice"),
        ("server:\n  port: 1\n  host: a\n  port: 2\n", "port is given twice"),
        ("server: {port: 1}\nserver: {port: 2}\n", "server is given twice"),
        ("port: 1\nserver: {port: 2}\n", "port is given twice"),
        ("log-level: info\nlog_level: debug\n", "log_level is given twice"),
        ("port: 1\n" + "# \n" * 2**20, "larger than 1048576 bytes"),
        ("mem-fraction-static: 0.8\n", "use --device-memory-utilization"),
        ("pipeline-role: prefill_only\n", "write prefill."),
        ("disable-radix-cache: true\n", "write --no-enable-prefix-caching"),
    ],
)
def test_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config("--config-file", _file(tmp_path, text))
    assert message in caught.value.message


def test_standing_options_may_stand_in_a_file(tmp_path: Path) -> None:
    text = "pipeline-role: prefill_and_decode\ntp-size: 1\nenable-penalties: true\nnnodes: 1\n"
    assert _config("--config-file", _file(tmp_path, text)) == Config()


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config-file nowhere\.yaml: cannot be read"):
        _config("--config-file", "nowhere.yaml")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TRIPTYCH_PROT": "1"}, "did you mean TRIPTYCH_PORT?"),
        ({"TRIPTYCH_QQQQ": "1"}, "TRIPTYCH_QQQQ is not an option."),
        ({"TRIPTYCH_PORT": "eighty"}, "expected a whole number"),
        ({"TRIPTYCH_HEADLESS": "maybe"}, "expected true or false"),
        ({"TRIPTYCH_KV_CACHE_PAGE_SIZE": "48"}, "must be a power of two"),
    ],
)
def test_wrong_environment_is_explained(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(environ=environ)
    assert message in caught.value.message


def test_environment_reads_lists_and_switches() -> None:
    environ = {"TRIPTYCH_API_KEY": "a, b", "TRIPTYCH_OFFLINE": "on", "PATH": "/bin"}
    config = resolve(environ=environ)
    assert config.server.api_key == ("a", "b")
    assert config.models.offline


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--kv-cache-page-size", "0"), "must be a power of two"),
        (("--device-memory-utilization", "1.01"), "above 0 and at most 1, got 1.01"),
        (("--kvcache-ce-watermark", "0"), "above 0"),
        (("--sim-failure", "101"), "at most 100"),
        (("--port", "65536"), "at most 65535"),
        (("--max-queue-size", "0"), "at least 1"),
        (("--max-batch-size", "many"), "expected a whole number, got 'many'"),
        (("--prot", "1"), "unknown option --prot; did you mean --port?"),
        (
            ("--max_batch_size", "1"),
            "unknown option --max_batch_size; did you mean --max-batch-size?",
        ),
        (("-max-batch-size", "1"), "did you mean --max-batch-size?"),
        (("-hf", "a/b"), "-hf is not offered: name a repository"),
        (("-model", "a"), "unknown option -model; did you mean --model?"),
        (("-n", "4"), "-n is not offered: "),
        (("--max-model-len", "auto"), "got 'auto'. Instead, leave it out"),
        (("--ssl-keyfile", "k.pem"), "--ssl-keyfile needs --ssl-certfile"),
        (("--ssl-certfile", "c.pem", "--ssl-ca-certs", "a.pem"), "effect only together"),
        (("--root-path", "llm/"), "begin it with a slash"),
        (
            ("--moe-runner-backnd", "x"),
            "did you mean --moe-runner-backend? That is not offered: exp",
        ),
        (("--zzzz",), "see `triptych serve --help`"),
        (("stray",), "unexpected argument 'stray'"),
        (("--headless", "--external-engine"), "exclude each other"),
        (("--headless",), "--headless needs --zmq-endpoint-base"),
        (
            ("--no-enable-chunked-prefill", "--long-prefill-token-threshold", "64"),
            "--long-prefill-token-threshold limits prompt chunks",
        ),
        (
            ("--no-enable-chunked-prefill", "--max-num-partial-prefills", "2"),
            "--max-num-partial-prefills limits prompt chunks",
        ),
        (("--max-long-partial-prefills", "1"), "one after the other"),
        (
            (
                "--model",
                "a",
                "--model",
                "b",
                *("--served-model-name", "x", "--served-model-name", "y"),
                "--served-model-name",
                "z",
            ),
            "more --served-model-name",
        ),
    ],
)
def test_wrong_flags_are_explained(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(*argv)
    assert message in caught.value.message


def test_switches_lists_and_aliases_on_the_command_line() -> None:
    config = _config(
        "--model-path", "a", "--model", "b", "--no-enable-prefix-caching", "--page-size", "64"
    )
    assert config.models.model == ("a", "b")
    assert not config.cache.enable_prefix_caching
    assert config.cache.kv_cache_page_size == 64


def test_a_command_may_take_some_sections_only() -> None:
    parser = _parser(sections=("models",))
    config = resolve(parse(parser, ["--model", "a", "--log-level", "debug"]), environ={})
    assert (config.models.model, config.server.log_level) == (("a",), "debug")
    with pytest.raises(ConfigError, match="--port is not an option of"):
        parse(parser, ["--port", "1"])


def test_a_command_may_leave_out_an_option_it_has_itself() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, exclude=("seed",))
    parser.add_argument("--seed", type=int, default=7)
    assert parse(parser, []).seed == 7


def test_python_options_are_checked_alike() -> None:
    assert make_config({"max-batch-size": 4}).schedule.max_batch_size == 4
    assert make_config({"model": "a"}).models.model == ("a",)
    with pytest.raises(ConfigError, match="max_batch_sice is not an option"):
        make_config({"max_batch_sice": 4})
    with pytest.raises(ConfigError, match="expected a whole number"):
        make_config({"max_batch_size": "4"})


def test_secrets_are_neither_shown_nor_quoted() -> None:
    resolved = resolve_with_sources(parse(_parser(), ["--api-key", "hush"]), environ={})
    shown = {option.name: value for option, value, _ in describe(resolved)}
    assert shown["api_key"] == ("***",)
    with pytest.raises(ConfigError, match="the secret itself"):  # a dump is no key to a server
        make_config({"api_key": shown["api_key"]})
    with pytest.raises(ConfigError) as caught:
        make_config({"api_key": {"hush": 1}})
    assert "hush" not in caught.value.message


@pytest.mark.parametrize("value", ["1, 4,8", [1, 4, 8], (1, 4, 8)])
def test_numbers_may_be_a_list_or_text(value: object) -> None:
    assert make_config({"chunk_size": value}).speech.chunk_size == (1, 4, 8)
    assert make_config({"chunk_size": 25}).speech.chunk_size == (25,)


def test_numbers_come_from_flags_and_variables() -> None:
    config = resolve(parse(_parser(), ["--chunk-size", "1,2"]), environ={})
    assert config.speech.chunk_size == (1, 2)
    assert resolve(environ={"TRIPTYCH_CHUNK_SIZE": "7"}).speech.chunk_size == (7,)


def test_fractions_and_negative_numbers_make_a_list() -> None:
    args = parse(_parser(), ["--teacache-coefficients=-450,280,3.2"])
    assert resolve(args, environ={}).images.teacache_coefficients == (-450.0, 280.0, 3.2)
    assert make_config({"teacache_coefficients": 2}).images.teacache_coefficients == (2.0,)
    with pytest.raises(ConfigError, match="expected numbers separated by commas"):
        make_config({"teacache_coefficients": "1,x"})
    with pytest.raises(ConfigError, match="at most 1e"):
        make_config({"teacache_coefficients": [float("nan")]})


@pytest.mark.parametrize(
    "options",
    [
        {"teacache": True, "first_block_caching": True},
        {"teacache": True, "taylorseer": True},
        {"step_cache": "planned", "taylorseer": True},
        {"step_cache": "off", "teacache": True},
    ],
)
def test_an_image_has_one_step_cache(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"one step cache.* and .*--step-cache"):
        make_config(options)
    make_config({"first_block_caching": True, "taylorseer": True})
    make_config({"step_cache": "teacache", "teacache": True})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1,x", "chunk_size: expected whole numbers separated by commas, got '1,x'."),
        ("", "chunk_size: expected whole numbers separated by commas, got ''."),
        ([2, 0], "chunk_size: must be at least 1, got 2, 0."),
        (1.5, "chunk_size: expected whole numbers separated by commas, got 1.5."),
    ],
)
def test_wrong_numbers_are_explained(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_config({"chunk_size": value})


def test_help_names_default_and_escapes_percent() -> None:
    text = _parser().format_help()
    assert "[default 0.06]" in text
    assert "[default 32; for chat, vision, embedding and speech models]" in " ".join(text.split())
    assert "--no-enable-prefix-caching" in text
    assert "enable-penalties" not in text


def _values(option: Option) -> st.SearchStrategy[object]:
    if option.choices:
        return st.sampled_from(option.choices)
    if option.within is not None:
        low, high = option.within.low, min(option.within.high, 2**40)
        if option.within.is_power_of_two:
            return st.integers(0, 20).map(lambda exponent: 2**exponent)
        if option.type is int:
            return st.integers(int(low), int(high))
        if option.is_numbers:
            whole, fractions = st.integers(int(low), int(high)), st.floats(low, high)
            is_whole = option.type == tuple[int, ...]
            return st.lists(whole if is_whole else fractions).map(tuple)
        return st.floats(low, high, exclude_min=option.within.is_open)
    simple = {bool: st.booleans(), bool | None: st.none() | st.booleans(), str: st.text()}
    return simple.get(option.type, st.tuples(st.text(), st.text()))


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_json_round_trip(data: st.DataObject) -> None:
    skipped = {"headless", "external_engine", "enable_chunked_prefill"}  # exclude others
    skipped |= {"served_model_name", "log_module_level", "root_path", "api_key", "admin_key"}
    skipped |= set(SpeculationOptions.__dataclass_fields__)  # need each other
    skipped |= {"teacache", "first_block_caching", "taylorseer", "crash_dump_folder"}
    skipped |= {name for name in declared() if name.startswith("ssl_")}
    options = [option for name, option in declared().items() if name not in skipped]
    config = make_config({option.name: data.draw(_values(option)) for option in options})
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config  # for children
    again = make_config({option.name: value_of(config, option) for option in options})
    assert again == config


@given(st.floats() | st.integers())
def test_range_says_what_it_means(value: float) -> None:
    assert (value in Range(low=0, high=1, is_open=True)) == (0 < value <= 1)
    assert (value in Range(low=1)) == (value >= 1)


def test_range_of_powers() -> None:
    powers = Range(low=1, is_power_of_two=True)
    assert [value for value in range(-4, 20) if value in powers] == [1, 2, 4, 8, 16]
    assert str(powers) == "a power of two at least 1"


@pytest.mark.parametrize(
    ("argv", "text", "wanted"),
    [
        ((), "", None),
        ((), "device_graph_capture: null", None),
        ((), "device_graph_capture: true", True),
        (("--device-graph-capture",), "", True),
        (("--no-device-graph-capture",), "device_graph_capture: true", False),
    ],
)
def test_a_switch_may_be_left_to_what_runs(
    tmp_path: Path, argv: tuple[str, ...], text: str, wanted: bool | None
) -> None:
    config = _config(*argv, "--config-file", _file(tmp_path, text))
    assert config.device.device_graph_capture is wanted


def test_a_switch_that_is_left_open_takes_a_yes_or_no_from_the_environment() -> None:
    for word, wanted in (("on", True), ("no", False)):
        config = _config(environ={"TRIPTYCH_DEVICE_GRAPH_CAPTURE": word})
        assert config.device.device_graph_capture is wanted
    with pytest.raises(ConfigError, match="expected true or false, got 'perhaps'"):
        _config(environ={"TRIPTYCH_DEVICE_GRAPH_CAPTURE": "perhaps"})


def _operands(*argv: str) -> Config:
    parser = argparse.ArgumentParser(prog="triptych serve", allow_abbrev=False)
    add_model_operands(parser)
    add_options(parser)
    return resolve(parse(parser, argv), environ={})


@pytest.mark.parametrize(
    ("argv", "models"),
    [
        ((), ()),
        (("a",), ("a",)),
        (("a", "b", "--port", "1"), ("a", "b")),
        (("--port", "1", "a"), ("a",)),
        (("a", "--model", "b", "--offline", "c"), ("a", "c", "b")),
        (("-m", "a"), ("a",)),
    ],
)
def test_models_are_operands(argv: tuple[str, ...], models: tuple[str, ...]) -> None:
    assert _operands(*argv).models.model == models


def test_a_second_value_is_not_taken_for_a_model() -> None:
    """It would be looked up on the hub, and may be a key."""
    with pytest.raises(ConfigError, match="--api-key takes one value: repeat it") as caught:
        _operands("a", "--api-key", "first", "second")
    assert "second" not in caught.value.message
    with pytest.raises(ConfigError, match=r"^--api-key takes one value: repeat it") as caught:
        _operands("a", "--api-key=first", "second")
    assert "first" not in caught.value.message
    with pytest.raises(ConfigError, match="--allowed-origins takes one value"):
        _operands("--allowed-origins", "https://a", "https://b")


@pytest.mark.parametrize("words", [("1", "2", "4"), ("1,", "2"), ("1,2", "4.5")])
def test_a_second_number_is_not_taken_for_a_model(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--cuda-graph-bs takes one value: separate its numbers"):
        _operands("--cuda-graph-bs", *words)
    with pytest.raises(ConfigError, match="--cuda-graph-bs takes one value: separate its numbers"):
        _operands(f"--cuda-graph-bs={words[0]}", *words[1:])


def test_a_model_may_follow_a_list_of_numbers() -> None:
    config = _operands("--cuda-graph-bs", "1,2", "org/model")
    assert config.models.model == ("org/model",)
    assert config.device.device_graph_rows == (1, 2)


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_a_list_of_keys_is_not_taken_for_a_key(name: str) -> None:
    with pytest.raises(ConfigError, match="a key contains no comma; give each") as caught:
        _config(f"--{name.replace('_', '-')}", "s3cret,other")
    assert "s3cret" not in caught.value.message
    with pytest.raises(ConfigError, match="a key contains no comma"):
        make_config({name: ["s3cret,other"]})


def test_a_list_may_be_json() -> None:
    config = _config("--allowed-origins", '["*", "https://a"]', "--cors-origin", "[b")
    assert config.server.cors_origin == ("*", "https://a", "[b")


def test_secrets_are_masked() -> None:
    secrets = {"hf_token": "hf_s3cret", "ssl_keyfile_password": "s3cret", "api_key": ["s3cret"]}
    shown = describe(Resolved.of(make_config(secrets)))
    assert "s3cret" not in repr([(option.name, value) for option, value, _ in shown])
    with pytest.raises(ConfigError, match="is the mask of a secret"):
        make_config({"hf_token": "***"})


def test_a_variable_may_be_a_json_list() -> None:
    config = resolve(environ={"TRIPTYCH_CORS_ORIGIN": '["https://a", "https://b"]'})
    assert config.server.cors_origin == ("https://a", "https://b")


@pytest.mark.parametrize("variable", ["TRIPTYCH_S", "TRIPTYCH_C", "TRIPTYCH_M", "TRIPTYCH_NP"])
def test_one_letter_is_an_option_on_the_command_line_alone(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is not an option"):
        resolve(environ={variable: "5"})


def test_a_secret_may_contain_the_mask() -> None:
    assert resolve(environ={"TRIPTYCH_HF_TOKEN": "ab***cd"}).models.hf_token == "ab***cd"
