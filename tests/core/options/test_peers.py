"""The page about flags of other servers says what the command line does."""

import argparse
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import ConfigError
from triptych.core.options import refused
from triptych.core.options.peers import OLLAMA_VARIABLES, SERVERS, effect, render
from triptych.core.options.table import add_options, declared, parse
from triptych.core.process.once import once
from triptych.core.process.suggestions import nearest

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"
FLAGS = [flag for server in SERVERS for spellings in server.flags for flag in spellings]
OTHERS = """
    --ssl-keyfile --allowed-origins --block-size --max-num-seqs --root-path --enforce-eager
    --ctx-size --hf-token --max-logprobs --max-model-len --n-gpu-layers --max-num-batched-tokens
    --enable-auto-tool-choice --renderer-num-workers --sleep-mode-backend --watermark
    --prefix-match-unit --video-pruning-rate --interleave-mm-strings --spm-infill
    --image-processor-backend --retraction-policy --detokenizer-worker-num
    --default-priority-value --use-ray --enable-mis --disable-hybrid-kv-cache-manager
    --fingerprint-mode --numa-bind-nodes --mamba-backend --gdn-prefill-backend --embd-normalize
    --tags --control-vector --check-tensors --dynatemp-range --adaptive-target --batch-size
    --http2-max-concurrent-streams
"""
"""Flags that led to another meaning once, and some that no table has."""


@once
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triptych serve", allow_abbrev=False)
    add_options(parser)
    return parser


def test_page_is_current() -> None:
    hint = "run `python -m triptych.core.options.peers > docs/flags.md`"
    assert PAGE.read_text(encoding="utf-8") == render(), hint


def test_the_page_has_four_servers_and_no_flag_twice() -> None:
    assert sum(len(server.flags) for server in SERVERS) + len(OLLAMA_VARIABLES) > 200
    for server in SERVERS:
        flags = [flag for spellings in server.flags for flag in spellings]
        assert len(flags) == len(set(flags))
        assert len(server.flags) >= 40


@pytest.mark.parametrize("flag", sorted(set(FLAGS)))
def test_a_flag_does_as_the_page_says(flag: str) -> None:
    """Each effect is looked up again, by parsing the flag."""
    described = effect(flag)
    if described.startswith("refused: "):
        with pytest.raises(ConfigError) as caught:
            parse(_parser(), [flag, "x"])
        assert (
            caught.value.message == f"{flag} is not offered: {described.removeprefix('refused: ')}"
        )
    elif described.startswith("accepted ("):
        entry = refused.FIXED_BY_FLAG[flag]
        spelled = flag if entry.accepts != ("false",) else flag.replace("--", "--no-", 1)
        value = () if entry.is_switch else entry.accepts[:1]
        assert not vars(parse(_parser(), [spelled, *value])).keys() - {"config_file"}
    else:
        ours = re.findall("`(.*)`", described) or [flag]
        assert parse(_parser(), _typed(flag)) == parse(_parser(), _typed(ours[0]))


def _typed(flag: str) -> list[str]:
    """A flag, with a value if it takes one."""
    name = refused.TRANSLATED.get(flag, flag).partition("=")[0].replace("--no-", "--", 1)
    option = next(each for each in declared().values() if name in each.flags)
    return [flag] if option.is_switch or "=" in refused.TRANSLATED.get(flag, flag) else [flag, "1"]


def test_spellings_of_a_flag_do_the_same() -> None:
    for server in SERVERS:
        for first, *others in server.flags:
            meant = effect(first).replace("the same option", f"same as `{first}`")
            assert all(effect(other) == meant for other in others), first


def test_differences_in_meaning_are_on_the_page() -> None:
    for server in SERVERS:
        assert server.notes.keys() <= {first for first, *_ in server.flags}
        for flag, note in server.notes.items():
            assert re.search(
                rf"^\| `{flag}`.* \| {re.escape(f'{effect(flag)}; {note}')} \|$", render(), re.M
            )
    assert {"--gpu-memory-utilization", "--ctx-size"} <= {
        flag for server in SERVERS for flag in server.notes
    }


def test_the_options_for_ollamas_variables_exist() -> None:
    flags = {flag for option in declared().values() for flag in option.flags}
    for instead in OLLAMA_VARIABLES.values():
        assert set(re.findall(r"--[a-z][a-z-]+", instead)) <= flags


KNOWN = [
    *(flag for option in declared().values() for flag in option.flags),
    *refused.REFUSED,
]


def _meaning(flag: str) -> str:
    option = next((each for each in declared().values() if flag in each.flags), None)
    return option.name if option else effect(flag)


def _is_same(one: str, other: str) -> bool:
    """Whether two flags have one meaning, or one is refused in favor of the other."""
    meanings = {_meaning(one), _meaning(other)}
    return len(meanings) == 1 or any(
        re.search(rf"{flag}(?![a-z-])", meaning) for meaning in meanings for flag in (one, other)
    )


def _suggested(flag: str, known: Collection[str]) -> str | None:
    return nearest(flag, known, refused.FIXED_BY_FLAG)


def _long(flags: Collection[str]) -> list[str]:
    return sorted({flag for flag in flags if flag.startswith("--")})


@pytest.mark.parametrize("flag", _long([*FLAGS, *OTHERS.split()]))
def test_a_flag_never_leads_to_another_meaning(flag: str) -> None:
    """As if it were unknown here: only a flag with its own meaning may be suggested."""
    found = _suggested(flag, [each for each in KNOWN if each != flag])
    assert found is None or (flag in KNOWN and _is_same(found, flag))


@given(
    st.sampled_from(_long([flag for flag in FLAGS if flag in KNOWN and len(flag) > 5])), st.data()
)
def test_a_misspelled_flag_leads_to_its_own_meaning_or_nowhere(
    flag: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(2, len(flag) - 2))
    edits = {
        "swap": flag[:place] + flag[place + 1] + flag[place] + flag[place + 2 :],
        "drop": flag[:place] + flag[place + 1 :],
        "double": flag[:place] + flag[place] + flag[place:],
    }
    typed = data.draw(st.sampled_from(sorted(edits.values())))
    found = _suggested(typed, KNOWN)
    assert typed in KNOWN or found is None or _is_same(found, flag)
