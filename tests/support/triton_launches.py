"""What a launch would compile, without a GPU, in a process that does not interpret kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triptych.core.runtime.kernels.triton.compile import CompileTarget, describe
from triptych.core.runtime.kernels.triton.variant import Variant


def keys_of_launches(launch: Callable[[], None], target: CompileTarget) -> list[str]:
    """Triton's cache keys of the kernels that `launch` starts, in order. Runs none of them."""
    from triton.runtime.jit import JITFunction

    started: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        started.append((kernel, args, kwargs))

    run, JITFunction.run = JITFunction.run, note
    try:
        launch()
    finally:
        JITFunction.run = run
    return [_key_of_launch(*each, target) for each in started]


def key_of_variant(variant: Variant, target: CompileTarget) -> str:
    """The cache key of what is compiled ahead."""
    source, options = describe(variant, target)
    return _key(source, options, target)


def _key_of_launch(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: CompileTarget
) -> str:
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target.gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = {**kwargs, "debug": False, "instrumentation_mode": ""}
    bound, specialization, options = bind(*args, **kwargs)
    packed = kernel._pack_args(backend, kwargs, bound, specialization, options)
    options, signature, constants, attributes = packed
    source = ASTSource(kernel, signature, constants, attributes)
    return _key(source, options.__dict__, target)


def _key(source: Any, options: dict[str, Any], target: CompileTarget) -> str:
    from triton.compiler.compiler import make_backend

    return f"{source.hash()}-{make_backend(target.gpu).parse_options(dict(options)).hash()}"
