-- Forget runs that ended long ago, so that their ids are new.
with old as (
  select run from runs where ended_at <= now() - %(retention_s)s * interval '1 second'
  order by ended_at limit %(limit)s for update skip locked
)
delete from runs r using old where r.run = old.run returning r.run
