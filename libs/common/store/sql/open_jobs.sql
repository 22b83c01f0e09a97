-- Open jobs accepted in a window of age (seconds), after a cursor, for the sweeper.
select id::text as job, scope, key, fingerprint, user_id, name, args, timeout_s, hinted, on_machine_change, traceparent,
  state, attempts, machine, journal, outcome,
  (extract(epoch from accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from deadline_at) * 1000)::bigint as deadline_ms,
  (extract(epoch from ended_at) * 1000)::bigint as ended_ms
from requests
where ended_at is null and deadline_at > now()
  and accepted_at <= now() - %(older_than_s)s * interval '1 second'
  and accepted_at > now() - %(younger_than_s)s * interval '1 second'
  and (%(after)s::uuid is null or id > %(after)s::uuid)
order by id
limit %(limit)s
