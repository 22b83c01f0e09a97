-- A call that is repeated with the same id finds itself.
with token as (
  insert into machine_tokens (token_id, user_id, name, ttl_s, expires_at)
  values (%(token_id)s, %(user)s, %(name)s, %(ttl_s)s::float8, now() + %(ttl_s)s::float8 * interval '1 second')
  on conflict (token_id) do update set token_id = excluded.token_id
  returning *
), value as (
  insert into machine_token_values (hash, token_id, expires_at) select %(hash)s, token_id, expires_at from token
  on conflict (hash) do nothing
)
select token_id::text as token_id, user_id, name, (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from expires_at) * 1000)::bigint as expires_ms,
  (extract(epoch from revoked_at) * 1000)::bigint as revoked_ms
from token
