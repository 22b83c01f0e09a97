-- End jobs that may not be started again: past the deadline, begun elsewhere, or marked too often. What was begun
-- may have run (unknown); a hinted job that was marked too often failed; what was never begun expired.
with locked as (
  select r.id from requests r
  where r.id = any(%(ids)b::uuid[]) and r.ended_at is null
    and (r.deadline_at <= now() or r.attempts >= %(attempts_max)s
         or (r.on_machine_change = 'unknown' and r.machine is not null
             and (r.machine, r.journal) is distinct from (%(machine)s::text, %(journal)s::text)))
  order by r.scope, r.key for update
)
update requests r
set state = case when r.state = 'queued' then 'expired'
                 when r.hinted and r.deadline_at > now() and r.attempts >= %(attempts_max)s then 'failed'
                 else 'unknown' end,
    outcome = case when r.state = 'queued' then %(expired)s
                   when r.hinted and r.deadline_at > now() and r.attempts >= %(attempts_max)s then %(undeliverable)s
                   when r.deadline_at <= now() then %(late)s
                   when r.attempts >= %(attempts_max)s then %(poison)s
                   else %(elsewhere)s end,
    ended_at = now()
from locked
where r.id = locked.id
returning r.id::text as job
