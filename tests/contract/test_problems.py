"""Problem types: whoever sends one, a gateway documents it; `test_openapi` reads the pages."""

from collections import Counter

from common import problems as shared
from common.problems import ProblemType
from gateway import problems


def test_every_type_that_any_service_sends_is_documented_and_none_stands_for_two() -> None:
    """What the worker's handshake and the server below the gateway send is all in `common.problems`."""
    kinds = {kind for module in (shared, problems) for kind in vars(module).values() if isinstance(kind, ProblemType)}
    assert {slug for slug, count in Counter(kind.slug for kind in kinds).items() if count > 1} == set()
    assert set(problems.KINDS.values()) == kinds
