update machine_tokens set revoked_at = coalesce(revoked_at, now())
where token_id = %(token_id)s and user_id = %(user)s
returning token_id::text as token_id
