"""An engine process without torch: the real loop and scheduler, a fake model.

The name a model is served under, and what its prompts hold, choose what goes wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from support.engine_seams import FakeLoader, FakeRunner
from triptych.core.engine_api.plan import Plan, TokenPlan
from triptych.core.errors import WeightsError
from triptych.core.kv.pages import PagePool
from triptych.core.ledger import Ledger
from triptych.core.options.batch_limits import with_batch_limits
from triptych.core.options.config import Config
from triptych.core.weights.resolve import ResolvedModel
from triptych.engine_process import main
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.tokens.scheduler import TokenScheduler

STEP_S = 0.01
HANG_PROMPT = "~"
HANG_TOKEN_ID = 3 + sorted(map(chr, range(33, 127))).index(HANG_PROMPT)  # `text_models`


class SlowRunner(FakeRunner):
    """Takes a little time for a step, and for ever where a prompt holds the fatal token."""

    def launch(self, plan: Plan):
        assert isinstance(plan, TokenPlan)
        hangs = any(HANG_TOKEN_ID in row.token_ids for row in plan.rows)
        time.sleep(3600 if hangs else STEP_S)
        return super().launch(plan)


def build(config: Config, models: Sequence[ResolvedModel]) -> EngineCore:
    ledger = Ledger(2**30)
    page_size = config.cache.kv_cache_page_size

    def loader(name: str) -> FakeLoader:
        def make():
            scheduler = TokenScheduler(
                model=name,
                pool=PagePool(num_pages=1024, page_size=page_size),
                options=with_batch_limits(config.schedule, is_cpu=True, left_bytes=0),
                max_length=4096,
                namespace=b"fake",
            )
            return scheduler, SlowRunner(page_size=page_size, vocab_size=259)

        errors = [WeightsError("The fake model has no weights.")] if name == "unfit" else []
        return FakeLoader(name, make, errors=errors)

    if any(model.name == "crasher" for model in models):
        raise RuntimeError("crashed on purpose")
    return EngineCore([loader(model.name) for model in models], config=config, ledger=ledger)


if __name__ == "__main__":
    main(build)
