-- With `first_only` only while there is no usable key: `towline keys bootstrap` cannot be used to climb.
insert into api_keys (key_id, hash, name, scopes, users)
select %(key_id)s, %(hash)s, %(name)s, %(scopes)s, %(users)s
where not %(first_only)s or not exists (select from api_keys where revoked_at is null)
returning key_id::text as key_id, name, scopes, users, (extract(epoch from created_at) * 1000)::bigint as created_ms,
  null::bigint as revoked_ms
