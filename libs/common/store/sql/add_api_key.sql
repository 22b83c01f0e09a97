-- With `first_only` only while there is no usable key: `towline keys bootstrap` cannot be used to climb.
-- A call that is repeated with the same id finds itself.
insert into api_keys (key_id, hash, name, scopes, users)
select %(key_id)s::uuid, %(hash)s, %(name)s, %(scopes)s, %(users)s
where not %(first_only)s or not exists (select from api_keys where revoked_at is null and key_id <> %(key_id)s::uuid)
on conflict (key_id) do update set key_id = excluded.key_id
returning key_id::text as key_id, name, scopes, users, (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from revoked_at) * 1000)::bigint as revoked_ms
