"""`towline agents`: who answers threads."""

from typing import Annotated, Any, get_args

import typer

from towline.cli.connection import DEFAULT_URL, LimitOption, UrlOption, call, collect
from towline.cli.secrets import read_secret
from towline.cli.terminal import JsonFlag, examples, note, write_fields, write_json, write_table
from towline.wire.threads import AGENT_MEMBERS, TURN_CAP_S_DEFAULT, Agent, AgentKind, AgentPut

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Define who answers threads.")

# The member of an agent that each option gives; `--url` is the gateway's.
OPTIONS = {
    "url": "--endpoint",
    "model": "--model",
    "instructions": "--instructions",
    "tools": "--tool and --no-tools",
    "api_key": "--api-key",
    "signing_secret": "--signing-secret",
}

AgentArgument = Annotated[str, typer.Argument(help="The agent's name, as your product knows it.")]


@app.command(
    epilog=examples(
        "towline agents create echo --kind echo",
        "towline agents create support --kind http --endpoint https://product.internal/turns"
        " --signing-secret env:SIGNING_SECRET",
        "towline agents create helper --kind openai --endpoint https://api.openai.com/v1 --model gpt-5-mini"
        " --api-key @openai.key",
    )
)
def create(
    agent: AgentArgument,
    *,
    kind: Annotated[
        AgentKind,
        typer.Option(
            help="echo answers with the text itself; http asks an endpoint of yours; openai asks an API of chat"
            " completions."
        ),
    ],
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Where it is asked: your endpoint, or the base of the API.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which model it asks for, unless the thread says another.")] = None,
    instructions: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What it is told before the thread's entries.")
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(help="A tool of the user's machine that it is offered. Repeatable; by default all of them."),
    ] = None,
    no_tools: Annotated[bool, typer.Option("--no-tools", help="Offer it no tools.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="@FILE|env:VARIABLE",
            help="What holds the API's key. One that was stored stays if this is left out.",
        ),
    ] = None,
    signing_secret: Annotated[
        str | None,
        typer.Option(metavar="@FILE|env:VARIABLE", help="What holds the secret that requests to it are signed with."),
    ] = None,
    turn_cap_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="A turn that has not ended by then ends as failed.")
    ] = TURN_CAP_S_DEFAULT,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Define an agent, or define it anew. The same call again changes nothing."""
    if tool and no_tools:
        raise typer.BadParameter("one excludes the other", param_hint=OPTIONS["tools"])
    members: dict[str, Any] = {
        "url": endpoint,
        "model": model,
        "instructions": instructions,
        "tools": [] if no_tools else tool or None,
        "api_key": api_key,
        "signing_secret": signing_secret,
    }
    check_members(kind, members)
    for name in ("api_key", "signing_secret"):
        if members[name] is not None:
            members[name] = read_secret(members[name], OPTIONS[name])
    definition = AgentPut(kind, turn_cap_s=turn_cap_s, **members)
    put = call(url, lambda client: client.put_agent(agent, definition))
    (write_json if as_json else write_agent)(put)


@app.command(epilog=examples("towline agents show helper"))
def show(agent: AgentArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show how an agent is defined; of its secrets only whether it has them."""
    found = call(url, lambda client: client.read_agent(agent))
    (write_json if as_json else write_agent)(found)


@app.command("list", epilog=examples("towline agents list", "towline agents list --json"))
def list_(limit: LimitOption = 50, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List agents by name."""
    agents = call(url, lambda client: collect(client.list_agents(limit=limit)))
    if as_json:
        for agent in agents:
            write_json(agent)
        return
    write_table(
        ("agent", "kind", "endpoint", "model", "cap", "created"),
        [(a.agent, a.kind, a.url or "", a.model or "", f"{a.turn_cap_s:g} s", a.created_at) for a in agents],
        empty="no agents",
    )


@app.command(epilog=examples("towline agents delete helper"))
def delete(agent: AgentArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Forget an agent. Its threads can still be read, but nothing more is answered there."""
    call(url, lambda client: client.delete_agent(agent))
    if as_json:
        write_json({"agent": agent, "deleted": True})
    else:
        note(f"deleted {agent}")


def check_members(kind: AgentKind, members: dict[str, Any]) -> None:
    """Check that an agent of this kind has what it needs, and nothing that it does not use.

    Raises:
        typer.BadParameter: names the option.
    """
    needed, optional = AGENT_MEMBERS[kind]
    for name, value in members.items():
        if name in needed and value is None:
            raise typer.BadParameter(f"an agent of kind {kind} needs it", param_hint=OPTIONS[name])
        if value is not None and name not in needed | optional:
            kinds = [other for other in get_args(AgentKind) if name in set().union(*AGENT_MEMBERS[other])]
            raise typer.BadParameter(f"only for agents of kind {' or '.join(kinds)}", param_hint=OPTIONS[name])


def write_agent(agent: Agent) -> None:
    """Show one agent to a person."""
    is_model = agent.kind == "openai"
    write_fields(
        [
            ("agent", agent.agent),
            ("kind", agent.kind),
            ("endpoint", agent.url),
            ("model", agent.model),
            ("instructions", agent.instructions),
            ("tools", _tools(agent.tools) if is_model else None),
            ("API key", _has(agent.has_api_key) if is_model else None),
            ("signing secret", _has(agent.has_signing_secret) if agent.kind == "http" else None),
            ("turns end after", f"{agent.turn_cap_s:g} s"),
            ("created", agent.created_at),
        ]
    )


def _tools(names: list[str] | None) -> str:
    return "all of the user's machine" if names is None else ", ".join(names) or "none"


def _has(is_stored: bool) -> str:
    return "stored" if is_stored else "none"
