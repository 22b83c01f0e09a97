select key_id::text as key_id, scopes, users from api_keys where hash = %(hash)s and revoked_at is null
