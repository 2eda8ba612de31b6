"""`triptych warm-cache` makes bundles that a start uses, and takes or refuses every option."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.kernel_levels import cache_with_kernels
from support.weight_files import write_gguf
from triptych import warm_cache_cli
from triptych.cli import COMMANDS, main
from triptych.core.bundle.manifest import NAME, BundleManifest, read_bundle_manifest
from triptych.core.bundle.resolve import resolve_all
from triptych.core.bundle.store import Bundle
from triptych.core.bundle.triton_cache import restore
from triptych.core.errors import ConfigError
from triptych.core.options import refused
from triptych.core.options.config import ModelOptions
from triptych.core.options.table import parse
from triptych.core.process.lookups import Lookup, listen_to_lookups
from triptych.core.runtime.kernels.triton.compile import TARGETS
from triptych.core.weights.progress import SilentProgress

SEED_FLAGS = """
ce-delay-ms chat-template config-file custom-architectures data-parallel-degree debug-verify-replay
decode-stall-timeout-s defer-resolve device-graph-capture device-memory-utilization devices
draft-chat-template draft-config-file draft-data-parallel-degree draft-devices draft-enable-echo
draft-force-download draft-huggingface-model-revision draft-huggingface-weight-revision
draft-max-length draft-model-path draft-pool-embeddings draft-quantization-encoding draft-rope-type
draft-section-name draft-served-model-name draft-subfolder draft-trust-remote-code
draft-use-subgraphs draft-vision-config-overrides draft-weight-path enable-chunked-prefill
enable-echo enable-in-flight-batching enable-lora enable-min-tokens enable-overlap-scheduler
enable-penalties enable-prefix-caching enable-prioritize-first-decode enable-structured-output
enable-variable-logits ep-size ep-use-allreduce execute-empty-batches first-block-caching force
force-download gpu-profiling huggingface-model-revision huggingface-weight-revision kv-cache-format
kv-cache-page-size kv-connector kv-connector-config kvcache-ce-watermark lora-paths
max-batch-input-tokens max-batch-size max-batch-total-tokens max-length max-lora-rank max-num-loras
max-num-steps max-queue-size-tg max-vision-cache-entries min-batch-size-tg model model-override
model-path models num-speculative-tokens pipeline-role pool-embeddings prefer-module-v3
quantization-encoding reasoning-parser rejection-sampling-strategy relaxed-delta relaxed-topk
rope-type section-name served-model-name speculative-method subfolder synthetic-acceptance-rate
target taylorseer taylorseer-cache-interval taylorseer-max-order taylorseer-warmup-steps teacache
teacache-coefficients teacache-rel-l1-thresh trust-remote-code use-experimental-kernels
use-relaxed-acceptance-for-thinking use-subgraphs use-vendor-blas use-vendor-ccl
vision-config-overrides weight-path zmq-endpoint-base
"""
COMMAND = next(command for command in COMMANDS if command.name == "warm-cache")


@pytest.mark.parametrize("name", SEED_FLAGS.split())
def test_every_flag_of_the_seed_is_honoured_or_refused_by_name(name: str) -> None:
    flag, parser = f"--{name}", COMMAND.parser()
    known = {spelling for action in parser._actions for spelling in action.option_strings}
    if flag in {*known, *refused.TRANSLATED}:
        return
    with pytest.raises(
        ConfigError, match=rf"^{flag} is not offered: .+|{flag} is not an option of .+"
    ):
        parse(parser, [flag, "x"])


@pytest.mark.parametrize("flag", ["--port", "--api-key", "--host", "--zmq-endpoint-base"])
def test_what_only_a_server_reads_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-cache", flag, "1"]) == 2
    assert "it is for `triptych serve`" in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["warm-cache", "--help"])
    text = capsys.readouterr().out
    assert "--target cuda:sm_90" in text
    assert "--bundle" not in text.partition("examples:")[0]
    with pytest.raises(SystemExit, match="0"):
        main(["warm-cache", "--help-all"])
    assert "--bundle TEXT" in capsys.readouterr().out


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def warm(cache: Path, gguf: Path, *argv: str) -> int:
    common = ("--cache-dir", str(cache), "--device", "cpu", "--threads", "1")
    return main(["warm-cache", "--model", str(gguf), *common, *argv])


def start(cache: Path, gguf: Path, bundle: str = "auto") -> list[Lookup]:
    """What a start with the same model finds when it resolves it."""
    heard: list[Lookup] = []
    options = ModelOptions(model=(str(gguf),), cache_dir=str(cache), bundle=bundle)
    with listen_to_lookups(heard.append):
        resolve_all(options, SilentProgress())
    return heard


def only_bundle(cache: Path) -> BundleManifest:
    (folder,) = (path.parent for path in (cache / "bundles").glob(f"*/{NAME}"))
    return read_bundle_manifest(folder)


def test_a_bundle_has_what_a_start_needs(
    tmp_path: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = cache_with_kernels(tmp_path / "cache")
    assert warm(cache, gguf) == 0
    manifest = only_bundle(cache)
    assert [model.reference for model in manifest.models] == [str(gguf)]
    assert manifest.kernels is None or manifest.kernels.file in manifest.files
    assert manifest.memory is not None
    assert manifest.memory.planned["tiny/weights"] > 0
    assert {"weights", "load", "kernels"} <= manifest.phases.keys()
    shown = capsys.readouterr().err
    assert re.search(r"weights +\d+\.\d\d s +hits 0, misses 1; tiny: not in the cache", shown)
    assert [(each.phase, each.is_hit) for each in start(cache, gguf)] == [
        ("bundle", True),
        ("weights", True),
    ]


def test_a_second_run_finds_everything_and_replaces_the_bundle(
    tmp_path: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = cache_with_kernels(tmp_path / "cache")
    assert warm(cache, gguf) == 0
    before = only_bundle(cache)
    capsys.readouterr()
    assert warm(cache, gguf) == 0
    assert "hits 1, misses 0" in capsys.readouterr().err
    assert only_bundle(cache).models == before.models


def test_a_failed_run_leaves_no_bundle(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_cache_cli, "_profile", fail)
    assert warm(tmp_path / "cache", gguf) == 130
    assert not list((tmp_path / "cache" / "bundles").glob("*/*"))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--bundle", "none"), "there is nothing to write"),
        (("--target", "vulkan:1"), "is not a target"),
        (("--target", "cuda:gfx90a"), "is not a target"),
        (("--max-length", "-1"), "at least 0"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    gguf: Path,
    argv: tuple[str, ...],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert warm(tmp_path / "cache", gguf, *argv) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_kernels_for_a_device_elsewhere_hit_after_a_move(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here, restored into another folder, and there found by Triton itself."""
    pytest.importorskip("triton")
    from triptych.core.runtime.kernels.triton import compile as compiling

    monkeypatch.setattr(compiling, "kernel_modules", lambda: ["add_rms_norm"])
    bundle = tmp_path / "bundle"
    assert warm(tmp_path / "cache", gguf, "--target", "cuda:sm_90", "--bundle", str(bundle)) == 0
    moved = Bundle.open(bundle.rename(tmp_path / "moved"))
    assert "add_rms_norm.add_4096" in moved.manifest.targets["cuda:90"]
    assert moved.manifest.memory is None, "nothing is loaded where the device is not"
    shutil.rmtree(tmp_path / "cache")
    restore(moved, "cuda:90", tmp_path / "elsewhere")
    target = compiling.CompileTarget.parse("cuda:90")
    assert all(each.is_hit for each in compiling.compile_all([target], tmp_path / "elsewhere"))


def test_a_kernel_that_does_not_compile_ends_the_run(
    tmp_path: Path,
    gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("triton")
    from triptych.core.runtime.kernels.triton import compile as compiling

    def fail(targets: list[compiling.CompileTarget], *_: object) -> list[object]:
        fields = {"module": "linear", "variant": "square", "target": targets[0]}
        return [compiling.CompiledVariant(**fields, error="CompilationError: no")]

    monkeypatch.setattr(compiling, "compile_all", fail)
    assert warm(tmp_path / "cache", gguf, "--target", "hip:gfx942") == 2
    assert "linear.square does not compile for hip:gfx942" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "bundles").glob("*/*"))


def test_an_api_alone_stands_for_all_that_are_checked() -> None:
    targets = warm_cache_cli._read_targets(["cuda", "cuda:sm_90", "hip"])
    checked = [str(target) for target in TARGETS]
    assert {"cuda:80", "cuda:90", "hip:gfx942"} <= set(checked)
    assert list(map(str, targets)) == checked, "each once, however often it is named"
