-- Terminal outcomes (rule 1): guarded, so that there is one. A job that had ended already comes back as its record
-- says; what the machine said too late is kept beside it. A call that is repeated finds itself.
-- Locked in the order in which accept locks.
-- `select` hides how many there are, so that one plan is kept for all: to plan takes longer than to do it.
update requests r
set state = case when l.open then l.state else r.state end,
    outcome = case when l.open then l.outcome else r.outcome end,
    attempts = case when l.open then greatest(r.attempts, 1) else r.attempts end,
    ended_at = case when l.open then now() else r.ended_at end,
    ended_by = case when l.open then l.ended_by else r.ended_by end,
    late_outcome = case when l.open or l.outcome = r.outcome then r.late_outcome else coalesce(r.late_outcome, l.outcome) end
from (
  select r.id, v.state, v.outcome, v.ended_by, r.ended_at is null as open
  from unnest((select %(ids)b::uuid[]), %(users)b::text[], %(states)b::text[], %(outcomes)b::text[], %(finishes)b::uuid[])
    as v(id, user_id, state, outcome, ended_by)
  join requests r on r.id = v.id and r.user_id = v.user_id
  order by r.scope, r.key for update of r
) l
where r.id = l.id
returning r.ended_by::text as ended_by, r.id::text as job, r.user_id, r.state, r.attempts,
  case when r.ended_by = l.ended_by then null else r.outcome end as outcome,  -- up to a megabyte that the caller has
  (extract(epoch from r.ended_at) * 1000)::bigint as ended_ms
