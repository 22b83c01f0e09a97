-- Give a token another value and another life, for a session that holds the value `held`. No row: not due.
-- Of two callers each gets its own, and both are good; a call that is repeated finds itself.
with held as (
  select v.hash, least(v.expires_at, t.expires_at) as expires_at
  from machine_tokens t
  left join machine_token_values v on v.hash = %(held)s and v.token_id = t.token_id
  where t.token_id = %(token_id)s
), known as (
  select token_id from machine_token_values where hash = %(hash)s
), renewed as (
  update machine_tokens t
  set expires_at = now() + t.ttl_s * interval '1 second'
  from held
  where t.token_id = %(token_id)s and t.revoked_at is null and t.expires_at > now()
    and (held.hash is null or held.expires_at - now() < t.ttl_s * interval '0.2 seconds')
    and not exists (select from known)
  returning t.token_id, t.expires_at
), added as (
  insert into machine_token_values (hash, token_id, expires_at) select %(hash)s, token_id, expires_at from renewed
  on conflict (hash) do nothing
), others as (
  select v.hash, v.expires_at, row_number() over (order by v.used_at is null, v.expires_at desc) as place
  from machine_token_values v join renewed using (token_id)
  where v.hash <> %(held)s
), removed as (
  delete from machine_token_values v using others o
  where v.hash = o.hash and (o.expires_at <= now() or o.place > %(others_max)s)
)
select token_id::text as token_id from known union all select token_id::text from renewed
