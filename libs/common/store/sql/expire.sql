-- Deadlines (rule 10): what was never begun did not run (expired), what was begun may have (unknown).
-- Several sweepers at once each take others; a row that someone is writing is left to them.
with due as (
  select id from requests
  where ended_at is null and deadline_at <= now()
  order by deadline_at limit %(limit)s for update skip locked
)
update requests r
set state = case when r.state = 'queued' then 'expired' else 'unknown' end,
    outcome = case when r.state = 'queued' then %(expired)s else %(unknown)s end,
    ended_at = now()
from due
where r.id = due.id
returning r.id::text as job, r.scope, r.key, r.fingerprint, r.user_id, r.name, r.timeout_s, r.hinted,
  r.on_machine_change, r.traceparent, r.state, r.attempts, r.machine, r.journal, r.outcome,
  (extract(epoch from r.accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from r.deadline_at) * 1000)::bigint as deadline_ms,
  (extract(epoch from r.ended_at) * 1000)::bigint as ended_ms
