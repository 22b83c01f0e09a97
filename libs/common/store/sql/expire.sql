-- Deadlines (rule 10): what was never begun did not run (expired), what was begun may have (unknown).
-- Several sweepers at once each take others; a row that someone is writing is left to them.
with due as (
  select id from requests
  where ended_at is null and deadline_at <= now()
  order by deadline_at limit %(limit)s for update skip locked
)
update job_records r
set state = case when r.state = 'queued' then 'expired' else 'unknown' end,
    outcome = case when r.state = 'queued' then %(expired)s else %(unknown)s end,
    ended_at = now()
from due
where r.id = due.id
returning r.*
