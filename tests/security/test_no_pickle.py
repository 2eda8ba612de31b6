"""No code of ours can be made to run somebody's data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "schedulers", "modalities", "src/triptych", "samples", "tests")
PRODUCT = ("core", "schedulers", "modalities", "src")
BANNED_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
}
BANNED_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
_LAST_NAMES = {name.rpartition(".")[2] for name in BANNED_CALLS} | {
    "load",
    "recv_pyobj",
    "send_pyobj",
}
"""With other names at their end, calls do nothing that is banned."""
BANNED_SWITCHES = {"allow_pickle", "trust_remote_code", "shell"}


def violations(source: str, *, is_product: bool = False) -> Iterator[str]:
    """What `source` must not do. torch's restricted unpickler is for tests and recipes alone."""
    for node in ast.walk(ast.parse(source)):
        for module in _imported(node):
            if module.split(".")[0] in BANNED_MODULES or module == "multiprocessing.reduction":
                yield f"{node.lineno}: imports {module}"
        if isinstance(node, ast.Call) and (what := _verdict(node)):
            yield f"{node.lineno}: {what}"
        is_load = isinstance(node, ast.Attribute) and node.attr == "load"
        if is_product and is_load and ast.unparse(node) == "torch.load":
            yield f"{node.lineno}: names torch.load"


def _verdict(call: ast.Call) -> str:
    """What is wrong with a call; empty if nothing."""
    is_true = {
        keyword.arg
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    }
    if banned := is_true & BANNED_SWITCHES:
        return f"{ast.unparse(call.func)} with {banned.pop()}"
    if getattr(call.func, "attr", getattr(call.func, "id", "")) not in _LAST_NAMES:
        return ""
    name = ast.unparse(call.func)
    if name in BANNED_CALLS or name.endswith(("recv_pyobj", "send_pyobj")):
        return f"calls {name}"
    if name.startswith("torch.") and name.endswith(".load") and "weights_only" not in is_true:
        return "torch.load without weights_only=True"
    return ""


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


RUN_OUR_EXAMPLES = {
    ROOT / "tests" / name
    for name in ("live/test_docs_blocks.py", "live/test_page.py", "test_page.py")
}
"""Execute the Python of our docs and of the page, as their subject."""


def sources() -> list[Path]:
    # `src/triptych` holds links to the other folders; rglob does not follow them.
    return sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})


def test_the_whole_tree_is_read():
    names = {str(path.relative_to(ROOT)) for path in sources()}
    assert {"core/engine_api/job.py", "schedulers/engine.py", "src/triptych/serve.py"} <= names


def test_nothing_unpickles_evaluates_or_trusts_remote_code():
    found = [
        f"{path.relative_to(ROOT)}:{what}"
        for path in sources()
        if path not in RUN_OUR_EXAMPLES
        for what in violations(
            path.read_text(encoding="utf-8"), is_product=path.relative_to(ROOT).parts[0] in PRODUCT
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from pickle import loads",
        "import dill",
        "from joblib import load",
        "import cloudpickle as c",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.jit.load(f)",
        "socket.recv_pyobj()",
        "eval(text)",
        "exec(text)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_lint_finds_what_unpickles(bad):
    assert list(violations(bad))


@pytest.mark.parametrize(
    "good",
    ["torch.load(f, weights_only=True)", "model.eval()", "re.compile(x)", "json.load(f)"],
)
def test_the_lint_lets_pass(good):
    assert not list(violations(good))


def test_the_product_does_not_even_unpickle_with_restrictions():
    assert list(violations("torch.load(f, weights_only=True)", is_product=True))
    assert not list(violations("torch.save(f)", is_product=True))
