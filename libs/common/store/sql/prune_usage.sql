-- Forget old usage.
with old as (
  select turn, seam from usage_events where at <= now() - %(retention_s)s * interval '1 second'
  order by at limit %(limit)s for update skip locked
)
delete from usage_events u using old where (u.turn, u.seam) = (old.turn, old.seam) returning u.turn
