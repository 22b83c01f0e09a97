-- Forget ended records whose retention has passed.
with old as (
  select id from requests where ended_at <= now() - %(retention_s)s * interval '1 second'
  order by ended_at limit %(limit)s for update skip locked
)
delete from requests r using old where r.id = old.id returning r.id::text as job
