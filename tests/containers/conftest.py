"""The built images, run. Left out unless their tag is given:

make images && TOWLINE_TEST_IMAGES=dev make test            ENGINE=podman: where it was not docker that built them
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from image_containers import TAG, Containers, Engine, image_name

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without images there is nothing to try; with a tag given their absence is a failure."""
    for item in items:
        if HERE in item.path.parents:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))  # on a machine that does something else too
            if not TAG:
                item.add_marker(pytest.mark.skip(reason="needs images: `make images`, then TOWLINE_TEST_IMAGES=dev"))


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine that has them."""
    found = Engine.find()
    for image in ("gateway", "worker", "relay", "dev"):
        found.inspect("image", image_name(image))
    return found


@pytest.fixture
def containers(engine: Engine) -> Iterator[Containers]:
    """Starts containers that are gone after the test, whatever became of it."""
    started = Containers(engine)
    yield started
    started.remove()


@pytest.fixture
def stores(postgres_url: str, redis_url: str) -> dict[str, str]:
    """The environment of a service that has stores."""
    return {"DATABASE_URL": postgres_url, "REDIS_URL": redis_url}
