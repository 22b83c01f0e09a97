select key_id::text as key_id, name, scopes, users, (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from revoked_at) * 1000)::bigint as revoked_ms
from api_keys
where (%(before)s::uuid is null or key_id < %(before)s::uuid)
order by key_id desc limit %(limit)s
