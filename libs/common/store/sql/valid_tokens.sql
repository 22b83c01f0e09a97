-- Which of these machine tokens are still good, and which of them have used up four fifths of their life.
select token_id::text as token_id, coalesce(expires_at - now() < ttl_s * interval '0.2 seconds', false) as is_due
from machine_tokens
where token_id = any(%(ids)b::uuid[]) and revoked_at is null and (expires_at is null or expires_at > now())
