-- The records of those jobs that are open, with what their machines are given.
select id::text as job, scope, key, fingerprint, user_id, name, args, timeout_s, hinted, on_machine_change, traceparent,
  state, attempts, machine, journal, outcome,
  (extract(epoch from accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from deadline_at) * 1000)::bigint as deadline_ms,
  (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests
where id = any(%(ids)b::uuid[]) and ended_at is null
