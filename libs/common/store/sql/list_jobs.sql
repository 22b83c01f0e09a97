-- A user's jobs in one scope (null: its own), newest first, before a cursor (a job id; ids sort by time).
select id::text as job, scope, key, fingerprint, user_id, name, timeout_s, hinted, on_machine_change, traceparent,
  state, attempts, machine, journal, outcome,
  (extract(epoch from accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from deadline_at) * 1000)::bigint as deadline_ms,
  (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests
where user_id = %(user)s and kind = 'job' and scope = coalesce(%(scope)s::text, 'user:' || %(user)s)
  and (%(state)s::text is null or state = %(state)s)
  and (%(key)s::text is null or key = %(key)s)
  and (%(before)s::uuid is null or id < %(before)s::uuid)
order by id desc
limit %(limit)s
