insert into machine_tokens (token_id, hash, user_id, name, expires_at)
values (%(token_id)s, %(hash)s, %(user)s, %(name)s, now() + %(ttl_s)s * interval '1 second')
returning token_id::text as token_id, user_id, name, (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from expires_at) * 1000)::bigint as expires_ms, null::bigint as revoked_ms
