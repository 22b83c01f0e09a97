"""`towline tokens`: the credentials of sidecars, one user's each."""

from typing import Annotated

import typer

from towline.cli.connection import DEFAULT_URL, LimitOption, UrlOption, UserArgument, call, collect
from towline.cli.terminal import JsonFlag, examples, note, write_json, write_table

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Manage the tokens of users' sidecars.")


@app.command(
    epilog=examples(
        "towline tokens create alice --name laptop",
        "(umask 077; towline tokens create alice --ttl-s 86400 > token)",
    )
)
def create(
    user: UserArgument,
    name: Annotated[str, typer.Option(help="A name to know it by, such as the machine's.")] = "",
    ttl_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long it is good; by default until revoked.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Make a machine token. Its value is written to standard output this once, and stored nowhere."""
    token = call(url, lambda client: client.mint_machine_token(user, name=name, ttl_s=ttl_s))
    if as_json:
        write_json(token)
        return
    note(f"token {token.token_id} of {token.user}, good until {token.expires_at or 'it is revoked'}:")
    print(token.token)


@app.command("list", epilog=examples("towline tokens list alice"))
def list_(user: UserArgument, limit: LimitOption = 50, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List a user's machine tokens, newest first, revoked ones included."""
    tokens = call(url, lambda client: collect(client.list_machine_tokens(user, limit=limit)))
    if as_json:
        for token in tokens:
            write_json(token)
        return
    write_table(
        ("token", "name", "created", "expires", "revoked"),
        [(t.token_id, t.name, t.created_at, t.expires_at or "", t.revoked_at or "") for t in tokens],
        empty="no machine tokens",
    )


@app.command(epilog=examples("towline tokens revoke alice 01981c2e-7b1a-7cc2-9a52-5d0d6f3d9b11"))
def revoke(
    user: UserArgument,
    token_id: Annotated[str, typer.Argument(help="The token's id, as `list` shows it.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """End a machine token; its sidecar is disconnected within a heartbeat."""
    call(url, lambda client: client.revoke_machine_token(user, token_id))
    if as_json:
        write_json({"token_id": token_id, "revoked": True})
    else:
        note(f"revoked {token_id}")
