-- Cancel what is still queued (rule 10); anything begun ends as the machine says.
update requests r
set state = 'cancelled', outcome = %(outcome)s, ended_at = now()
where r.id = %(job)s and r.user_id = %(user)s and r.state = 'queued'
returning r.id::text as job, r.scope, r.key, r.fingerprint, r.user_id, r.name, r.timeout_s, r.hinted,
  r.on_machine_change, r.traceparent, r.state, r.attempts, r.machine, r.journal, r.outcome,
  (extract(epoch from r.accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from r.deadline_at) * 1000)::bigint as deadline_ms,
  (extract(epoch from r.ended_at) * 1000)::bigint as ended_ms
