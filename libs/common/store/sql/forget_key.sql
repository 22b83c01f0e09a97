-- Remove an ended record whose retention has passed, so that its key is new.
delete from requests
where scope = %(scope)s and key = %(key)s and ended_at <= now() - %(retention_s)s * interval '1 second'
