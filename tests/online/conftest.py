"""Places to serve in; whatever was started there ends with the test, or with its module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rl_harness.testing.serving import ServingPlace


@pytest.fixture(scope="module")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ServingPlace]]:
    places: list[ServingPlace] = []

    def make() -> ServingPlace:
        places.append(ServingPlace(tmp_path_factory.mktemp("serve")))
        return places[-1]

    yield make
    for place in places:
        place.kill()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ServingPlace]:
    place = ServingPlace(tmp_path)
    yield place
    place.kill()
