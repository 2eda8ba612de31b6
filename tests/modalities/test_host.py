"""Options of a model in this process."""

from dataclasses import replace

from triptych.core.options.config import Config
from triptych.core.options.table import Resolved
from triptych.modalities.host import schedule_in_process


def test_no_step_is_cut_for_clients_that_a_pipeline_does_not_have() -> None:
    config = Config()
    schedule = schedule_in_process(Resolved.of(config))
    assert schedule.target_first_token_s >= 3600
    assert replace(schedule, target_first_token_s=1.0) == config.schedule


def test_a_target_for_first_tokens_is_kept_if_it_was_set() -> None:
    config = Config()
    config = replace(config, schedule=replace(config.schedule, target_first_token_s=0.5))
    assert schedule_in_process(Resolved.of(config)) == config.schedule
