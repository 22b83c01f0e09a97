-- Accept a batch of requests. A key that is known gives back its record instead; `do update` (of nothing) makes sure
-- that a row comes back also when two callers arrive at once. Sorted, so that two batches cannot deadlock.
insert into requests as r
  (id, scope, key, fingerprint, user_id, name, args, timeout_s, hinted, on_machine_change, traceparent, deadline_at)
select v.id, v.scope, v.key, v.fingerprint, v.user_id, v.name, v.args, v.timeout_s, v.hinted, v.on_machine_change,
       v.traceparent, now() + v.deadline_s * interval '1 second'
from unnest(%(ids)b::uuid[], %(scopes)b::text[], %(keys)b::text[], %(fingerprints)b::bytea[], %(users)b::text[],
            %(names)b::text[], %(args)b::text[], %(timeouts)b::float8[], %(hinted)b::bool[], %(changes)b::text[],
            %(traceparents)b::text[], %(deadlines)b::float8[])
  as v(id, scope, key, fingerprint, user_id, name, args, timeout_s, hinted, on_machine_change, traceparent, deadline_s)
order by v.scope, v.key
on conflict (scope, key) do update set key = excluded.key
returning r.id::text as job, r.scope, r.key,
  (extract(epoch from r.accepted_at) * 1000)::bigint as accepted_ms,
  (extract(epoch from r.deadline_at) * 1000)::bigint as deadline_ms
