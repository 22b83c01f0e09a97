-- The record of an idempotency key, if its retention has not passed.
select id::text as job, scope, key, fingerprint, user_id, name, timeout_s, hinted, on_machine_change, traceparent,
  state, attempts, machine, journal, outcome,
  (extract(epoch from accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from deadline_at) * 1000)::bigint as deadline_ms,
  (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests
where scope = %(scope)s and key = %(key)s
  and (ended_at is null or ended_at > now() - %(retention_s)s * interval '1 second')
