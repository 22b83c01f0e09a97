-- Which of these machine tokens are still good, and of which the value that a session holds has used up four fifths of
-- its life, or is over.
select held.token_id::text as token_id, held.hash,
  t.ttl_s is not null
    and (v.hash is null or least(v.expires_at, t.expires_at) - now() < t.ttl_s * interval '0.2 seconds') as is_due
from unnest(%(ids)b::uuid[], %(hashes)b::bytea[]) held (token_id, hash)
join machine_tokens t on t.token_id = held.token_id
left join machine_token_values v on v.hash = held.hash and v.token_id = held.token_id
where t.revoked_at is null and (t.expires_at is null or t.expires_at > now())
