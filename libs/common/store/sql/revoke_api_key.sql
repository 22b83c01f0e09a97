update api_keys set revoked_at = coalesce(revoked_at, now()) where key_id = %(key_id)s
returning key_id::text as key_id
