"""What is remembered of hinted jobs, and how much."""

from towline.sidecar import recent
from towline.sidecar.decide import Row, State
from towline.sidecar.outcome import completed
from towline.sidecar.recent import Recent


def test_an_outcome_is_held_until_it_is_acknowledged() -> None:
    memory = Recent()
    memory.remember("ada", "a", completed(1))
    assert memory.find("ada", "a") == Row(State.ENDED, completed(1))
    assert memory.find("eve", "a") is None
    memory.acknowledge("eve", "a")
    memory.acknowledge("ada", "a")
    memory.acknowledge("ada", "a")
    assert memory.find("ada", "a") == Row(State.ACKNOWLEDGED)


def test_too_many_bytes_cost_the_oldest_its_outcome_but_not_its_row() -> None:
    memory = Recent()
    megabyte = completed("x" * (1024 * 1024 - 2))
    fits = recent.RESULT_BYTES_MAX // (1024 * 1024)
    for n in range(fits + 1):
        memory.remember("ada", f"{n}", megabyte)
    assert memory.find("ada", "0") == Row(State.ACKNOWLEDGED)
    assert memory.find("ada", "1") == Row(State.ENDED, megabyte)


def test_the_oldest_of_too_many_is_forgotten_held_or_not() -> None:
    memory = Recent()
    for n in range(recent.JOBS_MAX + 2):
        memory.remember("ada", f"{n}", completed(n))
        if n % 2:
            memory.acknowledge("ada", f"{n}")
    assert memory.find("ada", "0") is None
    assert memory.find("ada", "1") is None
    assert memory.find("ada", "2") is not None
