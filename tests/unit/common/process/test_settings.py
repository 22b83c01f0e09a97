"""Settings: one reading, one message for everything that is wrong, no secret in any text."""

import traceback

import pytest
from pydantic import ValidationError

from common.process.settings import CommonSettings, SettingsError, describe, load, unknown_variables
from gateway.settings import GatewaySettings
from relay.settings import RelaySettings
from worker.settings import WorkerSettings

SECRET = "hunter2"
SERVICES = [GatewaySettings, WorkerSettings, RelaySettings]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The least that a service needs, and nothing else of ours."""
    for cls in SERVICES:
        for row in describe(cls):
            monkeypatch.delenv(row.name, raising=False)
    monkeypatch.setenv("REDIS_URL", f"redis://:{SECRET}@localhost:6379/0")
    monkeypatch.setenv("DATABASE_URL", f"postgresql://towline:{SECRET}@localhost/towline")
    return monkeypatch


@pytest.mark.parametrize("cls", SERVICES)
def test_defaults_are_within_their_own_limits(cls: type[CommonSettings], environment: pytest.MonkeyPatch) -> None:
    """Each default is accepted when it is written out in the environment."""
    for row in describe(cls):
        if row.default != "required":
            environment.setenv(row.name, row.default)
    assert load(cls).heartbeat_s == 10


def test_values_of_the_environment_are_taken(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TOWLINE_ADMIN_PORT", "0")
    environment.setenv("TOWLINE_HEARTBEAT_S", "0.5")
    environment.setenv("TOWLINE_CORS_ORIGINS", " https://a.example , https://b.example:8443,")
    environment.setenv("TOWLINE_LOG_FORMAT", "")  # as Compose passes what is not set

    settings = load(GatewaySettings)

    assert (settings.admin_port, settings.heartbeat_s, settings.log_format) == (0, 0.5, "json")
    assert settings.cors_origins == ("https://a.example", "https://b.example:8443")
    assert SECRET in settings.redis_url.get_secret_value()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", f"http://:{SECRET}@localhost"),
        ("REDIS_URL", f"redis://:{SECRET}@localhost:port"),
        ("REDIS_URL", SECRET),
        ("DATABASE_URL", f"mysql://x:{SECRET}@localhost/x"),
        ("DATABASE_URL", f"postgresql://[{SECRET}"),
        ("DATABASE_URL", f"host=localhost password={SECRET}"),
        ("TOWLINE_ADMIN_PORT", "65536"),
        ("TOWLINE_ADMIN_PORT", "tcp://10.0.0.1:9090"),
        ("TOWLINE_HEARTBEAT_S", "nan"),
        ("TOWLINE_HEARTBEAT_S", "inf"),
        ("TOWLINE_HEARTBEAT_S", "0"),
        ("TOWLINE_UNREADY_S", "-1"),
        ("TOWLINE_LOG_LEVEL", "chatty"),
        ("TOWLINE_LOG_FORMAT", "xml"),
        ("TOWLINE_EGRESS_ALLOW", "example.com,10.0.0.1/8"),
        ("TOWLINE_EGRESS_PROXY", "egress-proxy:3128"),
        ("TOWLINE_CORS_ORIGINS", "https://a.example/path"),
        ("TOWLINE_IDEMPOTENCY", "sometimes"),
        ("TOWLINE_KEY_RETENTION_S", "1.5"),
        ("TOWLINE_BODY_BYTES_MAX", "256KiB"),
        ("TOWLINE_WAITERS_MAX", "0"),
        ("TOWLINE_DRAIN_S", "1e9"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)

    with pytest.raises(SettingsError) as caught:
        load(GatewaySettings)

    (problem,) = caught.value.problems
    assert problem.startswith(name)
    accepted = next(row.accepted for row in describe(GatewaySettings) if row.name == name)
    assert f"accepted: {accepted}" in problem
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_all_wrong_values_are_named_at_once(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("DATABASE_URL")
    environment.setenv("TOWLINE_BRIDGE_PORT", "-1")
    environment.setenv("TOWLINE_SOCKETS_MAX", "many")

    with pytest.raises(SettingsError) as caught:
        load(WorkerSettings)

    text = str(caught.value)
    assert "DATABASE_URL is missing" in text
    assert "TOWLINE_BRIDGE_PORT '-1'" in text
    assert "TOWLINE_SOCKETS_MAX 'many'" in text


def test_secrets_are_in_no_text_of_the_settings() -> None:
    settings = load(GatewaySettings)
    assert SECRET not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load(WorkerSettings).sockets_max = 1


def test_a_misspelt_variable_is_told(environment: pytest.MonkeyPatch) -> None:
    """Also with the right name: a default taken in silence is found out in production."""
    environment.setenv("TOWLINE_HEARTBEATS", "1")
    environment.setenv("TOWLINE_SOMETHING_ELSE", "1")
    # What Kubernetes adds for Services called towline-gateway and towline.
    environment.setenv("TOWLINE_GATEWAY_SERVICE_HOST", "10.0.0.1")
    environment.setenv("TOWLINE_GATEWAY_SERVICE_PORT_HTTP", "8080")
    environment.setenv("TOWLINE_GATEWAY_PORT", "tcp://10.0.0.1:8080")
    environment.setenv("TOWLINE_PORT_8080_TCP_ADDR", "10.0.0.1")

    ours = [name for name in unknown_variables(GatewaySettings) if "HEART" in name or "ELSE" in name or "PORT" in name]

    assert ours == ["TOWLINE_HEARTBEATS (did you mean TOWLINE_HEARTBEAT_S?)", "TOWLINE_SOMETHING_ELSE"]


@pytest.mark.parametrize("cls", SERVICES)
def test_every_variable_is_described(cls: type[CommonSettings]) -> None:
    rows = describe(cls)
    assert len({row.name for row in rows}) == len(cls.model_fields)
    assert all(row.accepted and len(row.reason) > 20 for row in rows)
    # A bound without a unit is a number nobody can judge.
    numbers = [row.name for row in rows if "number" in row.accepted and not row.name.endswith("_PORT")]
    assert all(
        name.endswith(("_S", "_BYTES", "_BYTES_MAX", "SOCKETS_MAX", "WAITERS_MAX", "_SLOTS")) for name in numbers
    )
