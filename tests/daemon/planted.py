"""Planted bugs: a story that never finds them could not find a real one either."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

ROUNDS, EXAMPLES = 6, 1000
"""One round misses a rare bug now and then: the order of sets, and so the story, differs from process to process."""


def assert_found(story: type[RuleBasedStateMachine], quick: settings, says: str) -> None:
    """Tell stories until one fails and says what is expected; a bug may show in other ways too."""
    few = settings(quick, max_examples=EXAMPLES, phases=[Phase.generate])
    for number in range(ROUNDS):
        told = seed(number)(type(story.__name__, (story,), {}))
        try:
            run_state_machine_as_test(told, settings=few)
        except AssertionError as error:
            if re.search(says, str(error)):
                return
    pytest.fail(f"{ROUNDS * EXAMPLES} stories found nothing that says {says!r}")
