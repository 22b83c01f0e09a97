-- Give a token a new value and another life; the old value stays good until it would have expired. No row: not due
-- (any more), so of two callers one renews.
update machine_tokens
set previous_hash = hash, previous_expires_at = expires_at, hash = %(hash)s,
    expires_at = now() + ttl_s * interval '1 second'
where token_id = %(token_id)s and revoked_at is null
  and expires_at > now() and expires_at - now() < ttl_s * interval '0.2 seconds'
returning token_id::text as token_id
