-- Begin marks (rule 3): what comes back may be sent, everything else may not. A job begun on one machine and journal
-- is never marked for another; five marks are enough (jobs that the machine reports as running are not marked again).
with v as (
  select * from unnest(%(ids)b::uuid[], %(machines)b::text[], %(journals)b::text[]) as v(id, machine, journal)
), locked as (
  select r.id from requests r join v using (id)
  where r.ended_at is null and r.deadline_at > now() and r.attempts < %(attempts_max)s
    and (r.machine is null or (r.machine = v.machine and r.journal = v.journal))
  order by r.id for update of r
)
update requests r
set state = 'processing', attempts = r.attempts + 1, machine = v.machine, journal = v.journal,
    begun_at = coalesce(r.begun_at, now())
from v join locked using (id)
where r.id = v.id
returning r.id::text as job, r.attempts
