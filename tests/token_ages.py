"""Machine tokens that have grown old, without waiting for it."""

import psycopg


async def grow_old(postgres_url: str, token_id: str, seconds: float) -> None:
    """As if so much more time had passed for this token and for all its values."""
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        for table in ("machine_tokens", "machine_token_values"):
            await connection.execute(
                f"update {table} set expires_at = expires_at - %s * interval '1 second' where token_id = %s",
                [seconds, token_id],
            )
