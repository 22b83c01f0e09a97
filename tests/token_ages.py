"""Machine tokens that have grown old, without waiting for it."""

import psycopg


async def grow_old(postgres_url: str, token_id: str, seconds: float) -> None:
    """As if so much more time had passed for this token and for all its values."""
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        for change in (
            "update machine_tokens set expires_at = expires_at - %(by)s * interval '1 second',"
            " previous_expires_at = previous_expires_at - %(by)s * interval '1 second' where token_id = %(token)s",
            "update machine_token_values set expires_at = expires_at - %(by)s * interval '1 second'"
            " where token_id = %(token)s",
        ):
            await connection.execute(change, {"by": seconds, "token": token_id})
