-- Begin marks (rule 3): what comes back may be sent, everything else may not. A job begun on one machine and journal
-- is never marked for another, and of two that ask at once one is answered; five marks are enough (jobs that the machine
-- reports as running are not marked again). Locked in the order in which accept locks, so that no two batches deadlock.
-- `select` hides how many there are, so that one plan is kept for all: to plan takes longer than to do it.
update requests r
set state = 'processing', attempts = r.attempts + 1, machine = l.machine, journal = l.journal,
    begun_at = coalesce(r.begun_at, now())
from (
  select r.id, v.machine, v.journal
  from unnest((select %(ids)b::uuid[]), %(machines)b::text[], %(journals)b::text[]) as v(id, machine, journal)
  join requests r on r.id = v.id
  where r.ended_at is null and r.deadline_at > now() and r.attempts < %(attempts_max)s
    and (r.machine is null or (r.machine = v.machine and r.journal = v.journal))
  order by r.scope, r.key for update of r
) l
where r.id = l.id
returning r.id::text as job, r.machine, r.journal, r.attempts
