select token_id::text as token_id, user_id, name, (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from expires_at) * 1000)::bigint as expires_ms,
  (extract(epoch from revoked_at) * 1000)::bigint as revoked_ms
from machine_tokens
where user_id = %(user)s and (%(before)s::uuid is null or token_id < %(before)s::uuid)
order by token_id desc limit %(limit)s
