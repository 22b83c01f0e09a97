-- Which of these machine tokens are still good.
select token_id::text as token_id from machine_tokens
where token_id = any(%(ids)b::uuid[]) and revoked_at is null and (expires_at is null or expires_at > now())
