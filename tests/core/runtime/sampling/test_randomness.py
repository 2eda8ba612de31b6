import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.runtime.sampling.randomness import stream_key, uniforms

SEEDS = st.integers(-(2**63) + 1, 2**63 - 1)


def splitmix64(state: int, count: int) -> int:
    """The `count`-th output of the published generator, stepped one by one."""
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    mixed = state
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


@given(key=st.integers(0, 2**64 - 1), position=st.integers(0, 500))
def test_position_indexes_the_published_stream(key: int, position: int) -> None:
    sampled = uniforms(np.array([key], np.uint64), np.array([position]))
    assert sampled[0] == (splitmix64(key, position + 1) >> 12) * 2.0**-52
    assert 0 <= sampled[0] < 1


def test_first_outputs_match_the_reference_implementation() -> None:
    # Outputs of Vigna's splitmix64.c for the state 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    sampled = uniforms(np.full(3, 1234567, np.uint64), np.arange(3))
    assert (sampled * 2.0**52).astype(np.uint64).tolist() == [value >> 12 for value in expected]


@given(seed=SEEDS, sample_index=st.integers(0, 127), other=st.integers(0, 127))
def test_streams_of_a_seed_differ_by_sample(seed: int, sample_index: int, other: int) -> None:
    same_key = stream_key(seed, sample_index) == stream_key(seed, other)
    assert same_key == (sample_index == other)


def test_uniform_over_positions_and_over_seeds() -> None:
    along_positions = uniforms(np.full(65536, stream_key(0, 0), np.uint64), np.arange(65536))
    keys = np.array([stream_key(seed, 0) for seed in range(65536)], np.uint64)
    along_seeds = uniforms(keys, np.zeros(65536, np.int64))
    for sampled in (along_positions, along_seeds):
        counts = np.histogram(sampled, 64, (0, 1))[0]
        chi_square = ((counts - 1024) ** 2 / 1024).sum()
        assert chi_square < 127  # 63 degrees of freedom, one chance in 250,000
        assert abs(np.corrcoef(sampled[:-1], sampled[1:])[0, 1]) < 0.02
